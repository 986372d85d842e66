"""A system prompt is pinned; one that another replaces is evicted, and undo restores it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from chatting import babbler, fail_reading, ids_of, notices, session, tiny
from held_rows import state
from sirchat.chat.events import Evicted, TurnDone
from sirchat.chat.session import Session
from sirchat.errors import ContextFullError, SettingError, UndoError
from sirchat.models.model import LoadedModel

SEA, MOUNTAINS = "Speak of the sea.", "Speak of mountains."


def talk(*texts: str, model: LoadedModel | None = None, **settings: Any) -> Session:
    chat = session(model or babbler(), **{"system": SEA, "max_new_tokens": 20, **settings})
    for text in texts:
        list(chat.ask(text))
    return chat


def held(chat: Session) -> str:
    """The text of system prompts that is held, without the sinks."""
    rows = chat.snapshot().rows
    return "".join(r.text for r in rows if r.role == "system" and "sink" not in r.flags)


def pinned(chat: Session) -> str:
    """The text of system prompts that is pinned."""
    rows = chat.snapshot().rows
    return "".join(r.text for r in rows if r.role == "system" and "pinned" in r.flags)


def turns(events: list[Any]) -> list[TurnDone]:
    return [event for event in events if isinstance(event, TurnDone)]


@pytest.mark.parametrize("policy", ["entropy", "salience", "full", "reservoir"])
@pytest.mark.parametrize("new", [None, MOUNTAINS])
def test_a_replaced_system_prompt_is_never_restored(policy: str, new: str | None) -> None:
    chat = talk("Hello.", policy=policy)
    events = chat.switch("/system", system=new)
    assert any(isinstance(event, Evicted) for event in events)
    chat.switch("/policy", policy="window", policy_options={})
    chat.switch("/policy", policy=policy, policy_options={})
    chat.switch("/recall", recall="cosine")
    for _ in range(3):
        list(chat.ask("Of the sea?"))
        assert held(chat) == (new or "")


def test_undo_restores_the_system_prompt_for_good() -> None:
    chat = talk("Hello.", "Hello again.")
    before = held(chat)
    chat.switch("/system", system=MOUNTAINS)
    list(chat.ask("And again."))
    chat.undo()
    chat.undo()
    assert chat.profile.system == SEA
    assert pinned(chat) == SEA
    list(chat.ask("Hello again."))
    chat.switch("/policy", policy="window", policy_options={})
    chat.switch("/policy", policy="salience", policy_options={})
    assert held(chat) == before


def test_undo_says_if_the_system_prompt_before_has_no_room_any_more() -> None:
    chat = talk("red " * 60, "Hello.", system="word " * 40, budget=160)
    chat.switch("/system", system=None)
    for turn in (1, 2, 3):
        with suppress(SettingError):
            chat.pin(f"turn {turn}")
    (line,) = notices(chat.undo())
    assert line.startswith("the system prompt is not pinned again: ")
    assert "would be pinned, but budget 160 allows only 80" in line
    assert not pinned(chat)
    chat.switch("/set", pin_system=False)
    list(chat.ask("Hello."))
    chat.switch("/system", system=None)
    assert not notices(chat.undo())


def test_a_system_prompt_too_long_to_pin_is_refused_before_anything_is_read() -> None:
    chat = talk(system="word " * 100, budget=64, recent=8)
    with pytest.raises(SettingError, match="would be pinned"):
        list(chat.ask("Hello."))
    assert chat.seen == 0


def test_switching_to_a_system_prompt_too_long_to_pin_changes_nothing() -> None:
    chat = talk("Hello.", budget=64, recent=8)
    before = (chat.profile, chat.seen)
    with pytest.raises(SettingError, match="would be pinned"):
        chat.switch("/system", system="word " * 60, budget=80)
    assert (chat.profile, chat.seen) == before
    assert chat.budget == 64
    assert pinned(chat) == SEA


@pytest.mark.parametrize("settings", [{"policy": "full"}, {"positions": "stream"}])
def test_a_system_prompt_for_which_the_context_has_no_room_changes_nothing(
    settings: dict[str, Any],
) -> None:
    chat = talk("Hello.", model=replace(babbler(), context_length=128), budget=128, **settings)
    while chat.seen < 90:
        list(chat.ask("And?"))
    before = state(chat)
    with pytest.raises(ContextFullError):
        chat.switch("/system", system="word " * 50)
    assert state(chat) == before
    assert pinned(chat) == SEA
    if chat.profile.policy == "full":  # the old prompt makes room
        free = 128 - chat.resident
        longer = next(n for n in range(99) if len(chat.template.system_turn("sea " * n).ids) > free)
        chat.switch("/system", system="sea " * longer)
        assert chat.resident <= 128


def test_undo_back_to_an_earlier_system_prompt_holds_it_under_a_smaller_budget() -> None:
    chat = talk("Hello.", "red " * 30, policy="sink", budget=128, recent=8)
    chat.switch("/system", system=MOUNTAINS)
    chat.switch("/budget", budget=64)
    chat.undo()
    assert chat.profile.system == SEA
    assert pinned(chat) == SEA, "all of it is held"
    assert chat.resident <= 64


def test_undo_back_to_a_system_prompt_that_is_too_long_now_lets_go_of_it() -> None:
    chat = talk("Hello.", "Hello.", system="sea " * 60, policy="sink", budget=256, recent=8)
    chat.switch("/system", system=None)
    chat.switch("/budget", budget=64)
    chat.undo()
    assert chat.profile.system == "sea " * 60
    assert not pinned(chat)
    list(chat.ask("Go on."))
    assert chat.resident <= 64


def test_another_system_prompt_is_read_and_pinned_and_the_old_one_unpinned() -> None:
    chat = talk("Hello.", budget=64, recent=8, max_new_tokens=40)
    seen = chat.seen
    events = chat.switch("/system", system=MOUNTAINS)
    assert [turn.role for turn in turns(events)] == ["system"]
    ids = tiny().tokenizer.encode(f"<|system|>{MOUNTAINS}<|end|>", add_special_tokens=False)
    assert ids_of(chat)[seen:] == ids
    for _ in range(5):
        list(chat.ask("word " * 40))
    assert pinned(chat) == MOUNTAINS
    chat.switch("/system", system=None)
    assert pinned(chat) == ""


def test_pin_system_switches_live_and_undo_keeps_it() -> None:
    chat = talk("Hello.", "Hello again.")
    chat.switch("/set", pin_system=False)
    assert pinned(chat) == ""
    chat.undo()
    assert pinned(chat) == ""
    chat.switch("/set", pin_system=True)
    assert pinned(chat) == SEA


def test_an_unpinned_system_prompt_stays_so_through_switches() -> None:
    chat = talk("Hello.")
    chat.pin("turn 0", pinned=False)
    chat.switch("/decay", decay=0.9)
    assert pinned(chat) == ""
    chat.pin("turn 0")
    chat.switch("/set", temperature=0.5)
    assert pinned(chat) == SEA


def test_a_system_prompt_whose_reading_fails_can_still_be_unpinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = talk("Hello.", system=None, budget=128, recent=8, max_new_tokens=8)
    with monkeypatch.context() as patch:
        fail_reading(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            chat.switch("/system", system="word " * 50)
    assert pinned(chat)
    chat.switch("/system", system=None)
    assert pinned(chat) == ""
    list(chat.ask("Go on."))


def test_an_interrupt_cuts_the_reading_of_a_system_prompt_short() -> None:
    chat = talk("Hello.", system=None, budget=128, recent=8, max_new_tokens=8)
    (turn,) = turns(chat.switch("/system", lambda: True, system="word " * 50))
    assert turn.finish == "interrupt"
    assert 0 < turn.tokens_in < 50
    assert ids_of(chat)[-1] == chat.template.closing[-1]


def test_a_first_turn_of_which_nothing_was_read_is_as_if_it_had_never_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = talk(policy="full", max_new_tokens=8)
    with monkeypatch.context() as patch:
        fail_reading(patch, 0, RuntimeError("no"))
        with pytest.raises(RuntimeError):
            list(chat.ask("Hello."))
    with pytest.raises(ContextFullError):
        list(chat.ask("word " * 5000))
    assert chat.undoable_message == "Hello.", "so /retry sends it again"
    list(chat.ask("Hello again."))
    assert ids_of(chat)[0] == tiny().tokenizer.bos_token_id
    assert [turn.role for turn in chat.snapshot().turns] == ["system", "user", "assistant"]
    assert pinned(chat) == SEA
    chat.undo()
    assert (chat.seen, chat.turns) == (0, [])
    with pytest.raises(UndoError, match="no message"):
        chat.undo()
