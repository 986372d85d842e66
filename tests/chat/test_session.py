"""A conversation: what is remembered, how settings switch, and that it stays well-formed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from inspect import CO_GENERATOR
from traceback import walk_stack
from typing import Any

import pytest

from chatting import babbler, fail_reading, ids_of, notices, session, tiny
from sirchat.chat.events import (
    Delta,
    Event,
    Evicted,
    Notice,
    Restored,
    Switched,
    TurnDone,
    to_json,
)
from sirchat.chat.rereading import copy_session
from sirchat.engine.engine import Generation
from sirchat.engine.eviction import Evictor
from sirchat.engine.reader import Reader
from sirchat.errors import ContextFullError, SettingError
from template_shapes import tool_quick


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It snows in {city}."


def _turns(events: list[Event]) -> list[TurnDone]:
    return [event for event in events if isinstance(event, TurnDone)]


def test_an_interrupt_keeps_the_partial_reply_and_closes_the_turn() -> None:
    chat = session(babbler(), max_new_tokens=1000)
    calls = iter(range(1000))
    events = list(chat.ask("Speak.", interrupted=lambda: next(calls) >= 7))
    reply = _turns(events)[-1]
    assert reply.finish == "interrupt"
    assert 0 < reply.tokens_out < 10
    assert reply.text == "".join(e.text for e in events if isinstance(e, Delta))
    assert ids_of(chat)[-1] == chat.template.closing[-1]
    assert _turns(list(chat.ask("Again.", interrupted=lambda: True)))[-1].finish == "interrupt"


def test_a_reply_whose_events_are_not_all_taken_is_kept_and_closed() -> None:
    chat = session(babbler(), max_new_tokens=1000)
    events = chat.ask("Speak.")
    while not isinstance(next(events), Delta):
        pass
    assert isinstance(events, Generator)
    events.close()
    assert chat.turns[-1].text
    assert chat.turns[-1].finish == "interrupt"
    read = chat.seen
    list(chat.read_user("Go on."))
    closing = chat.template.closing
    assert ids_of(chat)[read : read + len(closing)] == list(closing)
    assert len(chat.snapshot().rows) == chat.resident


def test_a_reply_that_can_not_begin_leaves_a_chat_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = session(babbler(), budget=48, recall="words", max_new_tokens=4)
    for text in ("My name is Anna.", "I live in Lisbon. " * 4):
        list(chat.ask(text))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Reader, "begin_reply", fail)
    with pytest.raises(MemoryError):
        list(chat.ask("Where do I live?"))
    monkeypatch.undo()
    assert not chat.engine.store.has_recall
    assert (chat.turns[-1].role, chat.turns[-1].finish) == ("assistant", "interrupt")
    assert [event for event in chat.ask("And my name?") if isinstance(event, TurnDone)]


def test_a_turn_that_fails_half_way_is_closed_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = session(babbler(), budget=64, recent=8, max_new_tokens=4)
    with monkeypatch.context() as patch:
        fail_reading(patch, 3, RuntimeError("out of luck"))
        with pytest.raises(RuntimeError, match="luck"):
            list(chat.ask("word " * 100))
    assert chat.turns[-1].text == "word " * 100, (
        "so it is saved, and /retry after a resume sends it"
    )
    read = chat.seen
    list(chat.ask("Go on."))
    told = ("<|end|>", "<|assistant|>", "<|end|>", "<|user|>")
    closed = [tiny().tokenizer.convert_tokens_to_ids(token) for token in told]
    assert ids_of(chat)[read : read + 4] == closed


def test_a_message_for_which_no_room_could_be_made_stays_in_the_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    chat = session(babbler(), budget=64, recent=8, max_new_tokens=4)
    list(chat.ask("word " * 40))
    monkeypatch.setattr(Evictor, "make_room_for_turn", fail)
    with pytest.raises(RuntimeError):
        list(chat.ask("word " * 40))
    assert chat.turns[-1].text == "word " * 40


def test_an_interrupted_paste_still_ends_with_the_reply_header() -> None:
    chat = session(babbler(), budget=64, recent=8)
    text = "word " * 300
    list(chat.ask(text, interrupted=lambda: True))
    header = tiny().tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert chat.seen < 150
    assert ids_of(chat).count(header) == 1


def test_full_refuses_a_turn_that_does_not_fit_and_keeps_the_rest() -> None:
    chat = session(babbler(), policy="full", max_new_tokens=5, system="Be kind.")
    with pytest.raises(ContextFullError):
        list(chat.ask("word " * 5000))
    assert chat.seen == 0, "no system prompt was read"
    list(chat.ask("Hello."))
    before = ids_of(chat)
    with pytest.raises(ContextFullError, match="policy full evicts none"):
        list(chat.ask("word " * 5000))
    assert ids_of(chat) == before
    assert chat.undoable_message == "Hello."
    list(chat.ask("Still here."))


def test_full_closes_a_reply_that_reaches_the_context_length() -> None:
    model = replace(babbler(), context_length=256)
    chat = session(model, policy="full", budget=128, max_new_tokens=10_000)
    events = list(chat.ask("Speak."))
    assert _turns(events)[-1].finish == "context"
    assert isinstance(events[-1], Notice)
    assert chat.resident == chat.seen == 256
    chat.switch("/policy", policy="entropy")
    assert chat.resident <= chat.budget == 128
    chat.switch("test", max_new_tokens=5)
    assert _turns(list(chat.ask("Go on.")))[-1].tokens_out == 5


@pytest.mark.parametrize("policy", ["window", "sink", "entropy", "random", "interval", "reservoir"])
def test_switching_takes_effect_at_once_and_loses_nothing_that_fits(policy: str) -> None:
    chat = session(babbler(), max_new_tokens=60)
    list(chat.ask("word " * 60))
    held = chat.resident
    events = chat.switch("/policy", policy=policy)
    assert not any(isinstance(event, Evicted) for event in events)
    assert chat.resident == held
    events = chat.switch("/budget", budget=64)
    assert chat.resident == 64
    switched = [e for e in events if isinstance(e, Switched)]
    assert [(e.what, e.old, e.new) for e in switched] == [("budget", 1024, 64)]
    events = chat.switch("/budget", budget=2048)
    assert chat.resident == held
    (back,) = (e for e in events if isinstance(e, Restored))
    assert len(back.positions) == held - 64
    assert [e.restored for e in events if isinstance(e, Switched)] == [held - 64]
    assert _turns(list(chat.ask("Go on.")))[-1].resident > 64


@pytest.mark.parametrize(
    ("policy", "setting", "used"),
    [("sink", {"recent": 20}, {"sinks": 8}), ("tova", {"decay": 0.9}, {"recent": 8})],
)
def test_a_setting_without_effect_says_so(
    policy: str, setting: dict[str, Any], used: dict[str, Any]
) -> None:
    chat = session(babbler(), policy=policy)
    told = notices(chat.switch("/set", **setting))
    assert told == [f"{next(iter(setting))} has no effect under policy {policy}"]
    assert not notices(chat.switch("/set", **used))
    with pytest.raises(SettingError, match="is a setting, not a policy option"):
        session(babbler(), policy_options={"recent": 3})


def test_window_pins_no_system_prompt_and_refuses_none() -> None:
    chat = session(babbler(), policy="window", system="word " * 60, budget=64, recent=8)
    list(chat.ask("Hello."))
    assert chat.resident <= 64


def test_events_have_the_held_tokens_only_when_asked() -> None:
    plain = [to_json(e) for e in session(max_new_tokens=5).ask("Hello.") if e.kind]
    assert all("tokens" not in event for event in plain)
    whole = [to_json(e) for e in session(tokens=True, max_new_tokens=5).ask("Hello.") if e.kind]
    rows: list[dict[str, Any]] = whole[-1]["tokens"]
    assert len(rows) == whole[-1]["resident"]
    assert rows[0]["surprisal"] is None
    assert rows[0]["flags"] == ("sink",)


@pytest.mark.parametrize(
    ("update", "hint"),
    [
        ({"model": "other"}, None),
        ({"seed": 3}, None),
        ({"dtype": "float16"}, None),
        ({"save": True}, "/save saves this chat from now on"),
        ({"save": False}, "start sirchat with --no-save"),
    ],
    ids=str,
)
def test_fixed_settings_cannot_switch(update: dict[str, Any], hint: str | None) -> None:
    chat = session(babbler(), save=not update.get("save"))
    before = chat.profile
    with pytest.raises(SettingError, match="can't change in a running chat") as caught:
        chat.switch("/set", **update)
    assert hint in (None, caught.value.hint)
    assert chat.profile == before


def test_a_reply_that_does_not_fit_leaves_no_turn() -> None:
    chat = session(policy="full")
    list(chat.read_user("Hello."))
    with pytest.raises(ContextFullError):
        list(chat.read_reply("word " * 3000))
    assert [turn.role for turn in chat.turns] == ["user"]


def test_lone_surrogates_are_replaced() -> None:
    chat = session(babbler(), max_new_tokens=4)
    events = list(chat.ask("left \ud83d right"))
    assert isinstance(events[-1], TurnDone)
    assert chat.turns[0].text == "left \ufffd right"
    list(chat.ask("a whole \U0001f600"))
    assert chat.turns[2].text == "a whole \U0001f600"


def test_positions_can_be_switched_before_the_first_turn_and_after_undoing_it() -> None:
    chat = session(babbler(), max_new_tokens=4, budget=64)
    assert chat.switch("/set", positions="stream")
    list(chat.ask("Hello."))
    chat.undo()
    chat.switch("/set", positions="cache")
    fresh = session(babbler(), max_new_tokens=4, budget=64)
    assert chat.engine.save().unknown_surprisal == fresh.engine.save().unknown_surprisal
    for each in (chat, fresh):
        list(each.ask("How are you?"))
    assert chat.snapshot().rows == fresh.snapshot().rows


def test_a_copy_of_a_session_goes_on_alike_even_if_nothing_was_read() -> None:
    chat = session(babbler(), max_new_tokens=4, budget=64)
    for text in ("Hello.", "How are you?"):
        copy = copy_session(chat)
        assert copy is not None
        for each in (chat, copy):
            list(each.ask(text))
        assert chat.snapshot().rows == copy.snapshot().rows


@pytest.mark.parametrize(("with_tools", "most"), [(False, 2), (True, 3)])
def test_a_token_rises_through_few_generators(
    with_tools: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, counts = Generation.read_chosen, set[int]()

    def running() -> int:
        frames = [frame for frame, _ in walk_stack(None)]
        return sum(bool(frame.f_code.co_flags & CO_GENERATOR) for frame in frames)

    def counting(self: Generation) -> None:
        counts.add(running() - before)
        read(self)

    before = running()
    monkeypatch.setattr(Generation, "read_chosen", counting)
    chat = session(tool_quick() if with_tools else tiny(), policy="full", max_new_tokens=6)
    events = list(chat.ask("Hello there.", tools=[weather] if with_tools else []))
    assert any(isinstance(event, Delta) for event in events)
    assert counts == {most}
