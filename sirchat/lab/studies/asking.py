"""Rounds of an evaluation, which the model reads or answers, and settings switched between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sirchat.chat.events import TurnDone
from sirchat.chat.session import Session
from sirchat.text.anchors import Per
from sirchat.text.template import Template


def read(session: Session, user: str, reply: str) -> None:
    """Read a round with a given reply."""
    for _ in session.read_user(user):
        pass
    for _ in session.read_reply(reply):
        pass


def ask(session: Session, user: str) -> str:
    """The reply that the model generates to the user's message, stripped; '' if there is none."""
    for event in session.ask(user):
        if isinstance(event, TurnDone) and event.role == "assistant":
            return event.text.strip()
    return ""


@contextmanager
def anchors_placed(session: Session, per: Per | None) -> Iterator[None]:
    """Place anchors by `per` within this block; None leaves them where the model has them."""
    original, anchors = session.template, session.model.anchors
    if per is None or anchors is None:
        yield
        return
    session.template = Template(session.model.tokenizer, replace(anchors, per=per))
    try:
        yield
    finally:
        session.template = original


def switch(session: Session, **settings: object) -> None:
    """Switch settings of a session at once."""
    session.switch("eval", **settings)
