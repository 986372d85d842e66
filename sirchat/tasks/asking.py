"""Rounds of an evaluation, read or answered by the model; settings switched between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sirchat.chat.events import TurnDone
from sirchat.chat.session import Session
from sirchat.text.anchors import Per
from sirchat.text.template import Template


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


@contextmanager
def anchors_placed(session: Session, per: Per | None) -> Iterator[None]:
    """Meanwhile, put the model's anchors elsewhere; None for where it has them, if any."""
    own, anchors = session.template, session.model.anchors
    if per is None or anchors is None:
        yield
        return
    session.template = Template(session.model.tokenizer, replace(anchors, per=per))
    try:
        yield
    finally:
        session.template = own


def switch(session: Session, **settings: object) -> None:
    """Change settings at once."""
    for _ in session.switch("eval", **settings):
        pass
