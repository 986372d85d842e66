"""The model's own summary of the conversation, read and pinned in place of what it forgets."""

from __future__ import annotations

from collections.abc import Iterator

from sirchat.chat.events import Event, Notice, TurnDone
from sirchat.chat.session import Interrupted, Session
from sirchat.chat.switching import temporarily
from sirchat.errors import UsageError

_QUESTION = (
    "Summarize our conversation so far in a few short sentences, with all names, numbers and "
    "decisions. Write nothing else."
)
_MARK = "Summary of our conversation so far, by the assistant: "
_ANSWER = "Noted."
_SHARE = 8
"""A summary takes at most the budget divided by this: pins may take half of it."""


def summarize(session: Session, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
    """Ask the model for a summary, undo that, and read the summary as a pinned turn.

    It is a turn like any other for `undo`. Raises UsageError where nothing was said, and
    SettingError where the pin leaves too little room; the conversation is then as it was.
    """
    if not session.turns:
        raise UsageError("nothing is said yet, so there is nothing to summarize")
    index, said = len(session.turns), ""
    most = max(16, min(session.profile.max_new_tokens, session.budget // _SHARE))
    with temporarily(session, "/summarize", {"max_new_tokens": most}):
        try:
            for event in session.ask(_QUESTION, interrupted):
                if not isinstance(event, TurnDone):
                    yield event
                elif event.role == "assistant":
                    said = event.text.strip()
        finally:
            if len(session.turns) > index:
                session.undo()
    if interrupted() or not said:
        yield Notice("no summary was made; the conversation is as it was")
        return
    yield from _quietly(session.read_user(_MARK + said))
    yield from _quietly(session.read_reply(_ANSWER))
    try:
        session.pin(f"turn {index}")
    except BaseException:
        session.undo()
        raise
    yield Notice(f"turn {index} is the summary, and pinned; /undo takes it back")


def _quietly(events: Iterator[Event]) -> Iterator[Event]:
    """Without the reports of turns that nobody said."""
    return (event for event in events if not isinstance(event, TurnDone))
