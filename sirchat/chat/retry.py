"""Answers the last message again under other settings, which hold for this reply alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sirchat.chat.events import Delta, Event, Notice, Reading, Undone
from sirchat.chat.session import Session
from sirchat.chat.settings import switched
from sirchat.errors import UsageError
from sirchat.memory.registry import BEST_RETRIEVER


def settings_for_full(session: Session) -> tuple[dict[str, Any], str]:
    """The settings with which `/retry full` answers, so that the cache holds the whole chat.

    Returns two things. The first are the settings to change, by name; empty if every token is held
    now. The second is a note for the user: if the chat is longer than the model's context, it says
    that not all tokens can be held; otherwise it is empty. Raises UsageError if some tokens were
    evicted and the archive is off, because these tokens can't be restored.
    """
    profile, model = session.profile, session.model
    if session.resident == session.seen:
        return {}, ""
    if profile.archive == "off":
        raise UsageError(
            "/retry full: the archive is off, so what was evicted can't be restored",
            hint="after /set archive ram, evicted tokens can be restored",
        )
    to_come = profile.max_new_tokens + len(session.template.closing)
    if session.seen + to_come <= model.context_length:
        return {"policy": "full", "policy_options": {}, "recall": "off", "evict": "when-full"}, ""
    updates = {"budget": model.context_length, "recall": "off"}
    return updates, f"the chat is longer than the model's context of {model.context_length:,}"


def retry_under(
    session: Session,
    updates: dict[str, Any],
    describe: Callable[[Session], str],
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Answer the user's last message again, with the settings `updates` for this one reply.

    The new reply replaces the old reply. First the model answers with the changed settings; this is
    a trial, which is undone. Then, with the usual settings, the message is read again, and so are
    the tokens of the new reply. So the cache is as if the new reply had been given with the usual
    settings. `describe` is called during the trial; the text that it returns becomes a notice.

    Raises UndoError if there is no message to undo, and SettingError if a setting is not allowed;
    both change nothing. If answering fails, the old reply is restored.
    """
    text, attempt = session.last_said, session.conversation.attempt
    switched(session.profile, session.model, "/retry", updates)
    before = session.last_reply
    yield from session.undo(keep_pins=True)
    try:
        with session.trial("/retry", updates):
            for event in session.ask(text, interrupted, attempt=attempt + 1):
                if isinstance(event, Reading | Delta | Notice):
                    yield event
            reply, note = session.last_reply, describe(session)
    except BaseException:
        if before is not None:
            list(session.ask(text, attempt=attempt, reply=before))
        raise
    for event in session.ask(text, attempt=attempt + 1, reply=reply):
        if not isinstance(event, Reading | Delta | Undone):
            yield event
    yield Notice(note)


def retriever_for_retry(session: Session, name: str) -> str:
    """The name of the retriever, the method that finds archived tokens, for `/retry recall NAME`.

    It is `name`, unless this is empty. Then it is the retriever that the chat uses or, if recall is
    off in the chat, the default retriever `BEST_RETRIEVER`.
    """
    usual = session.profile.recall
    return name or (BEST_RETRIEVER if usual == "off" else usual)


@contextmanager
def temporarily(session: Session, source: str, updates: dict[str, Any]) -> Iterator[None]:
    """Context manager: the settings `updates` hold inside the `with` block, the old ones after it.

    Error messages begin with `source`, the command that changes the settings.
    """
    before = {name: getattr(session.profile, name) for name in updates}
    if updates:
        session.switch(source, **updates)
    try:
        yield
    finally:
        if updates:
            session.switch(source, **before)
