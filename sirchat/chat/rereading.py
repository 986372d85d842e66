"""Reading a conversation anew: its text, turn by turn, in another session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sirchat.chat.session import Session
from sirchat.models.bars import Progress


class SaidTurn(Protocol):
    """A message: who spoke, and what was said."""

    @property
    def role(self) -> str: ...

    @property
    def text(self) -> str: ...


def read_again(
    session: Session, turns: Sequence[SaidTurn], progress: Progress | None = None
) -> None:
    """Read what user and model said in `session`, which is new and has a system prompt of its own.

    Nothing is generated. `progress` is called after each turn. Raises as `Session.read_user` does.
    """
    for number, turn in enumerate(turns, 1):
        if turn.role == "user":
            list(session.read_user(turn.text))
        elif turn.role == "assistant":
            list(session.read_reply(turn.text))
        if progress is not None:
            progress("reading the chat", number, len(turns))


def own_pins(session: Session) -> int:
    """How many tokens the user pinned; reading anew does not pin them again."""
    prompt, rows = session.conversation.system, session.snapshot().rows
    return sum("pinned" in row.flags and row.position not in prompt for row in rows)
