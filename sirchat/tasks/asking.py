"""Rounds of an evaluation, read or answered by the model; settings switched between them."""

from __future__ import annotations

from sirchat.events import TurnDone
from sirchat.session import Session


def read(session: Session, user: str, reply: str) -> None:
    """Read a round as it is."""
    for _ in session.read_user(user):
        pass
    for _ in session.read_reply(reply):
        pass


def ask(session: Session, user: str) -> str:
    """The model's reply."""
    for event in session.ask(user):
        if isinstance(event, TurnDone) and event.role == "assistant":
            return event.text.strip()
    return ""


def switch(session: Session, **settings: object) -> None:
    """Change settings at once."""
    for _ in session.switch("eval", **settings):
        pass
