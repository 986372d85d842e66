"""`/retry full`: one reply with all held, and then all is as it was."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import count
from signal import raise_signal
from typing import Any

import numpy as np
import pytest

from chatting import answer, babbler, notices, session, tiny
from held_rows import contents, same, state
from sirchat.chat.events import Delta, Event, Notice, TurnDone, Undone
from sirchat.chat.retry import settings_for_full
from sirchat.chat.session import Session
from sirchat.chat.state import last_generated_reply
from sirchat.chat.tool_loop import Toolbox
from sirchat.engine.sampling import Sampler
from sirchat.errors import SirchatError, UndoError, UsageError
from sirchat.models.model import LoadedModel
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.status import describe_recalled
from sirchat.ui.turn_commands import parse_retry, retry

SAID = ("My dog is called Rex.", "I live in Lisbon.", "Tell me a joke.", "What is my dog called?")


def told(*texts: str, **settings: Any) -> Session:
    chat = session(settings.pop("model", tiny()), **{"policy": "sink", "budget": 64, **settings})
    for text in texts or SAID:
        list(chat.ask(text))
    return chat


def retried(chat: Session, words: str) -> tuple[str, list[str]]:
    """The new reply, and the notes that are shown with it."""
    events = list(retry(chat, parse_retry(words), lambda: False))
    return answer(events), notices(events)


def test_retry_full_answers_with_everything_once() -> None:
    chat = told()
    assert "Rex" not in chat.turns[-1].text
    reply, notes = retried(chat, "full")
    assert reply == chat.turns[-1].text == "Your dog is called Rex."
    (note,) = notes
    assert note == (
        f"answered with all {chat.seen} tokens held, for this reply alone; "
        "the memory is then as before: "
        "policy sink, budget 64"
    )
    assert (chat.profile.policy, chat.budget, chat.resident) == ("sink", 64, 64)


def test_after_a_reply_with_everything_held_no_line_says_that_something_was_recalled() -> None:
    chat = told(recall="words")
    assert chat.recall.turns
    for event in retry(chat, parse_retry("full"), lambda: False):
        if isinstance(event, TurnDone) and event.role == "assistant":
            assert not describe_recalled(chat.recall, event.seen)
    assert not chat.recall.turns


def test_where_something_was_erased_the_line_says_why_not_all_is_held() -> None:
    chat = told()
    chat.erase("Lisbon")
    list(chat.ask(SAID[-1]))
    _, (note,) = retried(chat, "full")
    assert note.startswith("some tokens were erased, or are no longer archived: answered with ")


def test_with_tools_on_it_is_refused_before_anything_changes() -> None:
    def weather(city: str) -> str:
        return "Snow."

    chat = told()
    chat.toolbox, before = Toolbox([weather]), state(chat)
    with pytest.raises(UsageError, match="can't call tools"):
        retried(chat, "full")
    assert state(chat) == before


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("salience", "full"),
        ("reservoir", "--full"),
        pytest.param("h2o", "full", marks=pytest.mark.slow),
    ],
)
def test_the_cache_is_as_if_the_usual_settings_had_given_the_reply(
    policy: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a plain retry in which the sampler picks the ids of the other reply."""
    small: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 12, "decay": 0.9}
    sayings = ["red " * 30, "green " * 20, "red and blue " * 10]
    chat, plain = (told(*sayings, model=babbler(), policy=policy, **small) for _ in range(2))
    retried(chat, words)
    reply = last_generated_reply(chat.ledger, chat.turns)
    assert reply is not None
    ids = iter(reply.ids)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "pick", lambda *_: next(ids))
        list(plain.retry())
    assert plain.turns == chat.turns
    assert state(plain) == state(chat)
    assert same(contents(plain.engine), contents(chat.engine))
    assert chat.profile == plain.profile
    assert answer(list(chat.ask("yellow"))) == answer(list(plain.ask("yellow")))
    assert state(plain) == state(chat)
    chat.undo()
    chat.undo()
    assert state(chat) == state(told(*sayings[:2], model=babbler(), policy=policy, **small))


def test_after_another_reply_each_message_is_undone_once() -> None:
    chat = told()
    retried(chat, "full")
    retried(chat, "")
    for left in reversed(range(len(SAID))):
        list(chat.undo())
        assert sum(turn.role == "user" for turn in chat.turns) == left
    with pytest.raises(UndoError):
        list(chat.undo())


def test_a_chat_longer_than_the_context_is_held_as_far_as_it_fits() -> None:
    model = replace(babbler(), context_length=160)
    chat = told(*["red " * 30] * 5, model=model, budget=96, max_new_tokens=16)
    assert settings_for_full(chat)[0] == {"budget": 160, "recall": "off"}
    _, (note,) = retried(chat, "full")
    assert note.startswith("the chat is longer than the model's context of 160: answered with 1")
    assert f" of {chat.seen} tokens held" in note


def test_where_it_cannot_be_done_nothing_changes_and_one_line_says_why() -> None:
    chat = told(archive="off")
    before = state(chat), list(chat.turns)
    with pytest.raises(UsageError, match="the archive is off") as caught:
        retried(chat, "full")
    assert "\n" not in str(caught.value)
    assert (state(chat), chat.turns) == before
    with pytest.raises(UndoError):
        retried(session(tiny()), "full")
    with pytest.raises(UsageError, match="allowed: full"):
        parse_retry("fulll")


def test_where_nothing_was_evicted_retry_full_is_a_plain_retry() -> None:
    chat = told(SAID[0], budget=512)
    reply = chat.turns[-1].text
    assert retried(chat, "full") == (
        reply,
        [
            "everything was held already, so this is a plain /retry",
            "the reply is the same: with temperature 0 it can't differ; "
            "try /set temperature 0.7, /set top_k 40, and /retry",
        ],
    )


@pytest.mark.parametrize("words", ["", "full"])
def test_the_same_reply_is_not_said_to_replace_the_last(words: str) -> None:
    for settings, why in (
        ({"temperature": 0.2}, "the same; try"),
        ({}, "temperature 0 it can't"),
        ({"temperature": 0.9, "top_k": 1}, "top_k 1 it can't"),
    )[: 1 if words else 3]:
        chat = told(*SAID[:3], "What can you do?", **settings)
        before = chat.turns[-1].text
        reply, notes = retried(chat, words)
        assert reply == before
        assert not any("replaced" in note for note in notes)
        assert words or (notes[-1].startswith("the reply is the same") and why in notes[-1])
    with pytest.raises(UndoError, match="no message to undo"):
        retried(session(tiny()), words)


def test_a_failing_model_leaves_the_old_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, same_chat = told(), told()
    with monkeypatch.context() as patch:

        def fails(*_: object) -> int:
            raise SirchatError("the model has failed")

        patch.setattr(Sampler, "pick", fails)
        with pytest.raises(SirchatError, match="has failed"):
            retried(chat, "full")
    assert chat.turns == same_chat.turns
    assert state(chat) == state(same_chat)


@pytest.mark.parametrize("kind", [Undone, Delta, Notice])
def test_a_retry_that_ends_early_leaves_the_old_reply(kind: type[Event]) -> None:
    chat, same_chat = told(), told()
    events = retry(chat, parse_retry("full"), lambda: False)
    assert any(isinstance(event, kind) for event in events)
    events.close()  # type: ignore[attr-defined]
    assert chat.turns == same_chat.turns
    assert state(chat) == state(same_chat)


@pytest.mark.parametrize("has_pin", [False, True])
def test_ctrl_c_at_any_pass_of_a_model_leaves_the_old_reply_or_the_new_one(
    has_pin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    press = compile("for _ in '123': raise_signal(2)", "press", "exec")
    names = {"__name__": "sirchat.models.any", "raise_signal": raise_signal}
    usual, old, new, passes = LoadedModel.read, told(), told(), count()
    for chat in (old, new) if has_pin else ():
        chat.pin("last")
    retried(new, "full")
    while True:
        chat, number, calls = told(), next(passes), count()
        if has_pin:
            chat.pin("last")

        def read(*given: Any, number: int = number, calls: Any = calls, **more: Any) -> Any:
            if next(calls) >= number:
                exec(press, dict(names))
            return usual(*given, **more)

        with monkeypatch.context() as patch, InterruptFlag(), suppress(KeyboardInterrupt):
            patch.setattr(LoadedModel, "read", read)
            retried(chat, "full")
        is_new = next(calls) <= number
        same_chat = new if is_new else old
        assert chat.turns == same_chat.turns, number
        pins = chat.ledger.pinned_positions.tolist()
        assert pins == same_chat.ledger.pinned_positions.tolist(), number
        assert has_pin or state(chat) == state(same_chat)  # a pin moves other tokens at once
        if is_new:
            break
    assert number > 3


def test_rules_that_only_the_trial_could_pin_do_not_stop_its_end() -> None:
    chat = told("red " * 60, "green " * 60, budget=128, max_new_tokens=8)
    list(chat.ask("".join(f"Always use {'the word fox and ' * 7}{word}. " for word in "ab")))
    before = chat.ledger.pinned_positions.tolist()
    assert all(len(run) > 32 for run in np.split(chat.ledger.of_turn(4), 2))
    _, notes = retried(chat, "full")
    assert any("rules have at most 32" in note for note in notes)
    assert (chat.profile.policy, chat.budget) == ("sink", 128)
    assert chat.resident <= 128
    assert chat.ledger.pinned_positions.tolist() == before
    assert len(chat.turns) == 6


def test_an_interrupted_reply_stays_interrupted() -> None:
    chat = told(model=babbler(), max_new_tokens=40)
    stops = iter([False] * 30 + [True] * 99)
    events = list(retry(chat, parse_retry("full"), lambda: next(stops)))
    (done,) = [
        event for event in events if isinstance(event, TurnDone) and event.role == "assistant"
    ]
    assert done.finish == chat.turns[-1].finish == "interrupt"
    assert 0 < done.tokens_out < 40
