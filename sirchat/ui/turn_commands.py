"""`/undo`, and what `/edit` and `/retry` need: take back the last message or its reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from sirchat.chat.events import Event, Notice, Undone
from sirchat.chat.rereading import repinned_note, reread_before_message, reread_session
from sirchat.chat.retry import retry_as_usual, retry_with_settings, settings_for_full
from sirchat.chat.session import Interrupted, Session
from sirchat.config.profile import Profile
from sirchat.errors import UndoError, UsageError, format_value
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.status import loading_bar
from sirchat.ui.text import displayable_line, shorten


def undo(session: Session, screen: Screen, saved_chat: SavedChat) -> None:
    """Undo the last user turn and everything after it; raises UndoError if there is none.

    If the session can't (after a resume, or without an archive), `saved_chat` goes on with a new
    one that has read the earlier turns again.
    """
    try:
        events = session.undo()
    except UndoError:
        if not _has_message(session):
            raise
        text = next(turn.text for turn in reversed(session.turns) if turn.role == "user")

        def print_result(new: Session) -> None:
            remark = f"; {new.seen:,} tokens of earlier messages were read again"
            _print_undone(text, new, screen, remark)

        read = partial(reread_before_message, count=1)
        _read_again(session, read, print_result, screen, saved_chat)
        return
    for event in events:
        if isinstance(event, Undone):
            _print_undone(event.text, session, screen)
        elif isinstance(event, Notice):
            screen.note(event.text)


def make_undoable(session: Session, screen: Screen, saved_chat: SavedChat) -> None:
    """If the last message can't be undone, go on with a new session that has read the chat."""
    if not _has_message(session):
        return
    with suppress(UndoError):
        session.asked_point()
        return

    def print_result(new: Session) -> None:
        screen.note(f"{new.seen:,} tokens of earlier messages were read again")

    _read_again(session, reread_session, print_result, screen, saved_chat)


@dataclass(frozen=True)
class Retry:
    """Asks the chat for another reply to the last message."""

    full: bool = False  # hold everything that fits the model's context, for this reply alone


def parse_retry(rest: str) -> Retry:
    """Parse the argument of `/retry`, `full` or nothing; raises UsageError."""
    if rest not in ("", "full", "--full"):
        hint = "/set temperature 0.9, and then /retry, draws in another way"
        raise UsageError(f"/retry: {format_value(rest)} is not allowed; allowed: full", hint=hint)
    return Retry(full=bool(rest))


def edit(session: Session, text: str, interrupted: Interrupted) -> Iterator[Event]:
    """Replace the last message by `text`, and answer that."""
    told = Notice("your last message and its reply are replaced by what follows")
    for event in session.retry(interrupted, text):
        yield told if isinstance(event, Undone) else event


def retry(session: Session, request: Retry, interrupted: Interrupted) -> Iterator[Event]:
    """Undo the last reply, generate the requested one, and yield the events of this turn."""
    updates, note = settings_for_full(session) if request.full else ({}, "")
    if updates:
        describe = partial(_describe_retry, as_usual=session.profile, note=note)
        yield from retry_with_settings(session, updates, describe, interrupted)
        return
    if request.full:
        yield Notice("everything was held already, so this is a plain /retry")
    yield from retry_as_usual(session, interrupted)


def _has_message(session: Session) -> bool:
    return any(turn.role == "user" for turn in session.turns)


def _read_again(
    session: Session,
    read: Callable[..., Session],
    print_result: Callable[[Session], None],
    screen: Screen,
    saved_chat: SavedChat,
) -> None:
    """Let `saved_chat` go on with the new session that `read` makes of this chat."""
    with loading_bar(screen, session.model.name) as progress:
        new = read(session, progress=progress)
    with InterruptFlag():  # Ctrl-C does not stop it halfway
        saved_chat.replace_session(new)
    print_result(new)
    screen.note(repinned_note(new))


def _print_undone(text: str, session: Session, screen: Screen, remark: str = "") -> None:
    text = shorten(displayable_line(text), 60)
    screen.note(f"undone: {text}{remark}; holds {session.resident:,}/{session.budget:,}")


def _describe_retry(session: Session, as_usual: Profile, note: str) -> str:
    """Say how the settings of a reply, which are still in force, differ from `as_usual`."""
    if session.resident == session.seen:
        remark = f"answered with all {session.seen:,} tokens held"
    else:
        reason = note or "some tokens were erased, or are no longer archived"
        remark = f"{reason}: answered with {session.resident:,} of {session.seen:,} tokens held"
    usual = f"policy {displayable_line(as_usual.policy)}, budget {as_usual.budget:,}"
    return f"{remark}, for this reply alone; the memory is then as before: {usual}"
