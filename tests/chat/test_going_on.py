"""A reply that was cut goes on as if it had not been; one that repeats itself is cut."""

from __future__ import annotations

from typing import Any

import pytest

from chatting import babbler, session, tiny
from held_rows import state
from sirchat.chat.events import Delta, Notice, TurnDone
from sirchat.chat.plain_reply import PlainReply
from sirchat.chat.retry import go_on
from sirchat.chat.session import Session
from sirchat.chat.state import CUT
from sirchat.engine.sampling import Sampler
from sirchat.errors import UsageError

SAID = ("red " * 30, "green and red " * 20, "red and blue " * 10)


def told(most: int, **settings: Any) -> Session:
    small = {"budget": 96, "recent": 16, "decay": 0.9, "max_new_tokens": most, "stop_loops": True}
    chat = session(babbler(), **small | settings)
    for text in SAID:
        list(chat.ask(text))
    return chat


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "salience", "temperature": 1.0},
        {"policy": "sink", "recall": "mips", "recall_n": 24},
        {"policy": "sink", "archive": "off"},  # the reply is generated again
        pytest.param({"policy": "h2o", "stop_loops": False}, marks=pytest.mark.slow),
    ],
)
def test_a_reply_that_goes_on_is_as_if_never_cut(settings: dict[str, Any]) -> None:
    whole, cut = told(12, **settings), told(12, **settings)
    for chat, most in ((whole, 36), (cut, 12)):
        chat.switch("/set", max_new_tokens=most)
        list(chat.ask("black and red " * 4))
    at_cut = cut.turns[-1].text
    events = [*go_on(cut), *go_on(cut)]
    cut.switch("/set", max_new_tokens=36)
    (done, last) = (event for event in events if isinstance(event, TurnDone))
    new = [event.text for event in events[: events.index(done)] if isinstance(event, Delta)]
    assert at_cut + "".join(new) == done.text
    assert last.tokens_out == 36
    assert cut.turns == whole.turns
    assert state(cut) == state(whole)
    assert cut.state.totals.tokens_out == whole.state.totals.tokens_out
    for chat in (whole, cut):
        list(chat.ask("red " * 9))
    assert state(cut) == state(whole)
    if settings.get("archive") != "off":
        for chat in (whole, cut):
            chat.undo()
            chat.undo()
    assert state(cut) == state(whole)
    assert cut.turns == whole.turns


def test_after_another_message_the_last_reply_goes_on() -> None:
    chat = told(8)
    list(chat.ask("blue"))
    chat.undo()
    assert chat.turns[-1].finish in CUT
    (done,) = (event for event in go_on(chat) if isinstance(event, TurnDone))
    assert done.tokens_out == 16


def test_a_complete_reply_does_not_go_on() -> None:
    chat = session(tiny())
    list(chat.ask("My dog is called Rex."))
    assert chat.turns[-1].finish == "stop"
    with pytest.raises(UsageError, match="the last reply is complete"):
        list(go_on(chat))


def repeating(monkeypatch: pytest.MonkeyPatch, text: str, **settings: Any) -> tuple[Session, Any]:
    """A chat whose model writes `text` again and again, and the events of a turn in it."""
    chat = session(tiny(), **{"stop_loops": True, **settings})
    ids = chat.model.tokenizer.encode(text, add_special_tokens=False)
    start = chat.seen

    def pick(self: Sampler, logits: Any, said: Any, position: int) -> int:
        return int(ids[(position - start) % len(ids)])

    monkeypatch.setattr(Sampler, "pick", pick)
    return chat, list(chat.ask("Hello"))


def test_a_reply_that_repeats_itself_ends_and_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, events = repeating(monkeypatch, " He is a cat.", max_new_tokens=120)
    done = next(event for event in events if isinstance(event, TurnDone) and event.tokens_out)
    assert done.finish == "loop"
    assert done.tokens_out < 60
    (note,) = [note for event in events for note in PlainReply(chat).push(event)[1]]
    assert note == "the reply was ended because it repeated itself; --no-stop-loops lets it"
    (more,) = (event for event in go_on(chat) if isinstance(event, TurnDone))
    assert more.tokens_out > done.tokens_out
    assert not any(isinstance(event, Notice) for event in events)


def test_replies_may_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _ = repeating(monkeypatch, " He is a cat.", max_new_tokens=120, stop_loops=False)
    assert chat.turns[-1].finish == "length"
