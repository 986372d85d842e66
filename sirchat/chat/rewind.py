"""Going back several turns, also beyond those that can be undone."""

from __future__ import annotations

from sirchat.chat.rereading import read_again
from sirchat.chat.session import Session
from sirchat.errors import UndoError
from sirchat.models.bars import Progress


def check_rewind(session: Session, count: int) -> list[int]:
    """Indices of all user turns; raises UndoError if they are fewer than `count`."""
    asked = [index for index, turn in enumerate(session.turns) if turn.role == "user"]
    if count > len(asked):
        raise UndoError(f"there are {len(asked)} turns of yours to take back, not {count}")
    return asked


def rewind(session: Session, count: int) -> bool:
    """Take back the last `count` user turns and all after them.

    Turns are undone exactly where that is possible. Otherwise the turns before them are read again,
    from their text; returns whether they were.

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
    """Another session, with the same settings, that has read the turns before the last user turn.

    `session` stays as it is. Raises UndoError as `check_rewind` does.
    """
    before = session.turns[: check_rewind(session, 1)[-1]]
    again = Session(session.model, session.profile)
    read_again(again, before, progress)
    return again
