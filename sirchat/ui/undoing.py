"""`/undo`: exactly where that is possible, else by reading the chat anew up to the last message."""

from __future__ import annotations

from sirchat.chat.events import Undone
from sirchat.chat.rereading import own_pins
from sirchat.chat.rewind import read_before_last
from sirchat.chat.session import Session
from sirchat.errors import UndoError
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.loading import loading_bar
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten


def undo(session: Session, screen: Screen, saved_chat: SavedChat) -> Session | None:
    """Take back the last user turn and all after it, and say so.

    After a resume, and where something is gone that was held then, the turns before it are read
    anew in another session, which is returned and goes on in the same file. Raises UndoError,
    changing nothing, where nothing was said.
    """
    try:
        events = session.undo()
    except UndoError:
        if all(turn.role != "user" for turn in session.turns):
            raise
        return _read_anew(session, screen, saved_chat)
    for event in events:
        if isinstance(event, Undone):
            _report(event.text, session, screen)
    return None


def _read_anew(session: Session, screen: Screen, saved_chat: SavedChat) -> Session:
    said = next(turn.text for turn in reversed(session.turns) if turn.role == "user")
    with loading_bar(screen, session.model.name) as progress:
        before = read_before_last(session, progress)
    with Interrupt():  # all or nothing of it
        saved_chat.go_on_with(before)
    _report(said, before, screen, f"; {before.seen:,} tokens before it were read anew")
    if pins := own_pins(session):
        screen.note(f"{pins:,} tokens that you had pinned are not pinned any more")
    return before


def _report(text: str, session: Session, screen: Screen, how: str = "") -> None:
    text = shorten(displayable_line(text), 60)
    screen.note(f"undone: {text}{how}; holds {session.resident:,}/{session.budget:,}")
