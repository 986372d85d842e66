"""Reads conversations for a study in a session, as a chat does, and files of data."""

from __future__ import annotations

from pathlib import Path

from sirchat.chat.events import TurnDone
from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.memory.ledger import Role
from sirchat.text.template import Template, TurnIds
from sirchat.text.text_file import read_regular


def read_data(path: Path | str) -> bytes:
    """The contents of a file; SettingError if it can't be read."""
    try:
        return read_regular(Path(path))
    except OSError as error:
        raise SettingError(f"{str(path)!r} can't be read: {error.strerror or error}") from None


def read_data_text(path: Path | str) -> str:
    """The text of a file; SettingError if it can't be read, or is not UTF-8."""
    try:
        return read_data(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SettingError(f"{str(path)!r} can't be read: it is not UTF-8") from None


def whole_round(template: Template, user: str, reply: str, *, first: bool = False) -> TurnIds:
    """The token ids, with their roles, of a round: user turn, reply and closing tokens.

    `first` says whether the round is the first of the conversation.
    """
    user_turn = template.opening(user)[1] if first else template.user_turn(user)
    user_turn = template.followed_by(user_turn, "assistant")
    reply_turn, closing = template.assistant_turn(reply, user_turn.header), template.closing
    roles = [*user_turn.roles, *reply_turn.roles, *[Role.TEMPLATE] * len(closing)]
    return TurnIds([*user_turn.ids, *reply_turn.ids, *closing], roles, user_turn.content)


def read(session: Session, user: str, reply: str) -> None:
    """Read a user turn and the given reply in a session; nothing is generated."""
    list(session.read_user(user, next_role="assistant"))
    list(session.read_reply(reply))


def ask(session: Session, user: str) -> str:
    """Send a user message; returns the generated reply, without blanks at its ends."""
    for event in session.ask(user):
        if isinstance(event, TurnDone) and event.role == "assistant":
            return event.text.strip()
    return ""
