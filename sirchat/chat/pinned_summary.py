"""Lets the model read a summary of the chat as a pinned turn, and undoes that."""

from __future__ import annotations

from collections.abc import Iterator

from sirchat.chat.events import Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.state import UndoPoint
from sirchat.errors import UndoError

PREFIX = "Summary of our conversation so far, by the assistant: "  # begins every summary
_ANSWER = "Noted."  # the reply to a summary


def summary_size(session: Session, text: str) -> int:
    """Number of pinned tokens in the cache that a summary with this text takes."""
    start, end = session.template.user_turn(PREFIX + text).content
    return end - start


def summary_cost(session: Session, text: str) -> tuple[int, int]:
    """Number of tokens that a kept summary adds, and of those that are evicted for it."""
    template = session.template
    asked = template.followed_by(template.user_turn(PREFIX + text), "assistant")
    said = template.assistant_turn(_ANSWER, asked.header)
    closing = template.closing if said.closing is None else said.closing
    added = len(session.state.pending_ids) + len(asked.ids) + len(said.ids) + len(closing)
    return added, max(0, session.resident + added - session.budget)


def summary_turns(session: Session) -> list[int]:
    return [index for index, turn in enumerate(session.turns) if turn.is_summary]


def pin_summary(session: Session, text: str) -> Iterator[Event]:
    """Let the session read the summary `text` as a pinned user turn; unpin earlier summaries.

    One `undo` undoes this. Raises SettingError, changing nothing, if the pins would leave too
    little room.
    """
    index, held = len(session.turns), session.snapshot().rows
    former = {row.turn for row in held if "pinned" in row.flags} & set(summary_turns(session))
    freed = sum(row.turn in former and "pinned" in row.flags for row in held)
    more = summary_size(session, text) - freed
    session.engine.choice.check_pins(more, session.ledger.held_positions)
    yield from _unshown(session.read_user(PREFIX + text, next_role="assistant"))
    session.turns[index].is_summary = True
    session.recall.nothing_restored_reason = ""  # it is about the user's messages
    try:
        yield from _unshown(session.read_reply(_ANSWER))
        for turn in sorted(former):
            session.pin(f"turn {turn}", pinned=False)
        pinned = session.pin(f"turn {index}")
    except BaseException:
        session.undo()
        raise
    yield from (event for event in pinned if isinstance(event, Notice))
    replaced = "; the former summary is no longer pinned" if former else ""
    yield Notice(f"the summary is turn {index}, which is now pinned{replaced}; /undo removes it")


def last_user_message(session: Session) -> str:
    """The text of the user's last message that is no summary; UndoError if there is none."""
    points = session.history.messages
    messages = [(point.text, _is_of_summary(session, point)) for point in points] or [
        (turn.text, turn.is_summary) for turn in session.turns if turn.role == "user"
    ]
    texts = [text for text, is_summary in messages if not is_summary]
    if messages and not texts:
        raise UndoError("there is no message of yours to take back, only a summary")
    return texts[-1] if texts else session.undoable_message


def undo_summaries(session: Session) -> None:
    """Undo the summaries after the user's last message; UndoError if the user wrote no message."""
    last_user_message(session)
    while session.history.messages and _is_of_summary(session, session.history.messages[-1]):
        session.undo()


def _is_of_summary(session: Session, point: UndoPoint) -> bool:
    """Whether the turn that undoing to `point` takes back is a summary."""
    later = session.turns[point.turns :]
    return next((turn.is_summary for turn in later if turn.role == "user"), False)


def _unshown(events: Iterator[Event]) -> Iterator[Event]:
    """The events except `TurnDone`, because a summary is not shown as a message."""
    return (event for event in events if not isinstance(event, TurnDone))
