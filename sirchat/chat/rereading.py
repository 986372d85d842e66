"""Reading a conversation anew: in another session, or further back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sirchat.chat.last_reply import SUMMARY
from sirchat.chat.session import Session
from sirchat.chat.summary import pin_last_summary
from sirchat.errors import UndoError
from sirchat.models.progress import Progress


class SaidTurn(Protocol):
    """A message: who spoke, and what was said."""

    @property
    def role(self) -> str: ...

    @property
    def text(self) -> str: ...


def read_again(
    session: Session, turns: Sequence[SaidTurn], progress: Progress | None = None
) -> None:
    """Let `session`, a new one, read what user and model said; it keeps its own system prompt.

    Nothing is generated. `progress` is called after each turn. Raises like `Session.read_user`.
    """
    for number, turn in enumerate(turns, 1):
        if turn.role == "user":
            list(session.read_user(turn.text))
        elif turn.role == "assistant":
            list(session.read_reply(turn.text))
        if progress is not None:
            progress("reading the chat", number, len(turns))


def own_pins(session: Session) -> int:
    """Number of tokens that the user pinned; if the text is read again, their pins are lost."""
    prompt, rows = session.conversation.system, session.snapshot().rows
    return sum("pinned" in row.flags and row.position not in prompt for row in rows)


def check_rewind(session: Session, count: int) -> list[int]:
    """Indices of all user turns; raises UndoError if there are fewer than `count` user turns."""
    asked = [index for index, turn in enumerate(session.turns) if turn.role == "user"]
    if count > len(asked):
        raise UndoError(f"the chat has only {len(asked)} user turns to take back, not {count}")
    return asked


def own_message(session: Session) -> str:
    """Text of the user's last message that can be undone; a summary is the model's, and none.

    Raises UndoError if there is none.
    """
    own = [one.text for one in session.undoable if not one.text.startswith(SUMMARY)]
    if session.undoable and not own:
        raise UndoError("there is no message of yours to take back, only a summary")
    return own[-1] if own else session.last_said


def undo_summaries(session: Session) -> None:
    """Undo the summaries after the user's last message; raises UndoError as `own_message` does."""
    own_message(session)
    before = len(session.turns)
    while session.last_said.startswith(SUMMARY):
        session.undo(keep_pins=True)
    if len(session.turns) < before:
        pin_last_summary(session)


def rewind(session: Session, count: int) -> bool:
    """Undo the last `count` user turns, and all turns after the first of these turns.

    If possible, the turns are undone exactly. Otherwise the session is reset and reads the text of
    all earlier turns again; returns whether it was reset.

    Raises UndoError, changing nothing, as `check_rewind` does.
    """
    asked = check_rewind(session, count)
    try:
        for _ in range(count):
            session.undo()
    except UndoError:
        before = session.turns[: asked[-count]]
        session.reset()
        read_again(session, before)
        return True
    return False


def read_before_last(session: Session, progress: Progress | None = None) -> Session:
    """A new session, with the same settings, that has read all turns before the last user turn.

    `session` stays as it is. Raises UndoError as `check_rewind` does.
    """
    before = session.turns[: check_rewind(session, 1)[-1]]
    again = Session(session.model, session.profile)
    read_again(again, before, progress)
    return again
