"""Prints one turn of `tiny` as it goes through sirchat, for sirchat/README.md."""

from __future__ import annotations

from collections.abc import Iterator

from plain_model import load_model
from sirchat.chat.events import Delta, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.text.template import TurnIds

TOLD, ASKED = "My name is Anna.", "What is my name?"


def lines() -> Iterator[str]:
    """The lines that the README shows."""
    model = load_model("tiny")
    chat = Session(model, Profile(model="tiny", budget=40, temperature=0, max_new_tokens=8))
    list(chat.ask(TOLD))
    sent: TurnIds = chat.template.user_turn(ASKED)
    yield f"{'text':8}{ASKED!r}"
    yield f"{'ids':8}{' '.join(map(str, sent.ids))}; of the message: {sent.content}"
    before = chat.seen
    for event in chat.ask(ASKED):
        if isinstance(event, TurnDone):
            yield (
                f"{'event':8}turn {event.index} {event.role}: tokens_in {event.tokens_in}, "
                f"tokens_out {event.tokens_out}, resident {event.resident}, seen {event.seen}, "
                f"finish {event.finish}"
            )
        elif isinstance(event, Delta) and event.text:
            yield f"{'event':8}delta {event.text!r}"
    for row in chat.tokens(range(before, chat.seen)):
        nats = "-" if row.surprisal is None else f"{row.surprisal:.3f}"
        yield f"{'row':8}{row.position} id {row.id} {row.text!r} {row.role} {nats} nats"


if __name__ == "__main__":
    print("\n".join(lines()))  # noqa: T201
