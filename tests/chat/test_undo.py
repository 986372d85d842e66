"""Turns taken back, and said again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache_contents import state
from chatting import answer, babbler, session
from sirchat.chat.events import TurnDone, Undone
from sirchat.chat.session import Session
from sirchat.chat.state import undo_depth
from sirchat.errors import ContextFullError, UndoError

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 30}


def undo(chat: Session) -> Undone:
    (event,) = chat.undo()
    assert isinstance(event, Undone)
    return event


@pytest.mark.slow
@pytest.mark.parametrize("system", [None, "You are Tiny."])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_turn_undone_and_said_again_is_as_if_said_once(
    system: str | None, temperature: float
) -> None:
    chat = session(babbler(), system=system, temperature=temperature, decay=0.9, **SMALL)
    sayings = ["red " * 20, "green " * 20, "blue " * 20, "black " * 20]
    states, replies = [state(chat)], []
    for text in sayings:
        replies.append(answer(list(chat.ask(text))))
        states.append(state(chat))
    for n in (3, 2, 1, 0):
        assert undo(chat).text == sayings[n]
        assert state(chat) == states[n]
    assert [answer(list(chat.ask(text))) for text in sayings] == replies
    assert state(chat) == states[-1]


def test_what_was_undone_is_named() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("one"))
    seen = chat.seen
    list(chat.ask("two"))
    event = undo(chat)
    assert (event.turn, event.text, event.seen) == (2, "two", seen)


def test_settings_stay_when_a_turn_is_undone() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("one " * 30))
    list(chat.ask("two " * 30))
    list(chat.switch("/policy", policy="sink", budget=64))
    undo(chat)
    assert (chat.profile.policy, chat.profile.budget) == ("sink", 64)
    assert chat.resident <= 64
    list(chat.ask("three"))


def test_there_may_be_nothing_to_undo() -> None:
    chat = session(babbler(), **SMALL)
    with pytest.raises(UndoError, match="no message"):
        list(chat.undo())
    list(chat.ask("one"))
    undo(chat)
    with pytest.raises(UndoError):
        list(chat.undo())
    list(chat.ask("one"))
    chat.reset()
    with pytest.raises(UndoError):
        list(chat.undo())


def test_without_an_archive_one_turn_is_undone_and_the_hint_says_how_to_have_more() -> None:
    chat = session(babbler(), archive="off", **SMALL)
    for text in ("one " * 30, "two " * 30, "three " * 30):
        before = state(chat)
        list(chat.ask(text))
    undo(chat)
    assert state(chat) == before
    with pytest.raises(UndoError, match="archive"):
        list(chat.undo())
    assert state(chat) == before


def test_a_turn_that_was_refused_is_not_one_to_undo() -> None:
    chat = session(babbler(), policy="full", max_new_tokens=8)
    list(chat.ask("one"))
    with pytest.raises(ContextFullError):
        list(chat.ask("word " * 5000))
    assert undo(chat).text == "one"


def test_a_reply_that_was_stopped_is_undone_like_any() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("one " * 20))
    before = state(chat)
    said = 0

    def stops() -> bool:
        nonlocal said
        said += 1
        return said > 7

    list(chat.ask("two " * 20, stops))
    undo(chat)
    assert state(chat) == before


def test_another_reply_is_drawn_and_a_greedy_one_is_the_same() -> None:
    drawn = session(babbler(), temperature=1.0, **SMALL)
    first = answer(list(drawn.ask("one " * 20)))
    others = [answer(list(drawn.retry())) for _ in range(3)]
    assert len({first, *others}) == 4
    undo(drawn)
    assert answer(list(drawn.ask("one " * 20))) == first
    greedy = session(babbler(), **SMALL)
    first = answer(list(greedy.ask("one " * 20)))
    events = list(greedy.retry())
    assert answer(events) == first
    assert [type(event) for event in events if isinstance(event, Undone | TurnDone)] == [
        Undone,
        TurnDone,
        TurnDone,
    ]


def test_with_nothing_said_nothing_is_retried() -> None:
    with pytest.raises(UndoError):
        list(session(babbler(), **SMALL).retry())


def test_carried_logits_are_those_of_then() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("one"))
    logits = chat._engine.logits
    list(chat.ask("two"))
    undo(chat)
    assert logits is not None
    assert chat._engine.logits is not None
    assert torch.equal(chat._engine.logits, logits)


def test_the_system_prompt_of_then_is_in_force_again() -> None:
    chat = session(babbler(), system="Be brief.", **SMALL)
    list(chat.ask("one"))
    list(chat.ask("two"))
    list(chat.switch("/system", system="Be loud."))
    undo(chat)
    assert chat.profile.system == "Be brief."
    pinned = [row.text for row in chat.snapshot().rows if "pinned" in row.flags]
    assert "brief" in "".join(pinned)
    list(chat.switch("/system", system="Be loud."))
    pinned = [row.text for row in chat.snapshot().rows if "pinned" in row.flags]
    assert "loud" in "".join(pinned)
    assert "brief" not in "".join(pinned)


def test_fewer_turns_can_be_undone_where_each_needs_a_large_state() -> None:
    assert [undo_depth(True, size) for size in (0, 1000, 100 << 20, 1 << 40)] == [64, 64, 2, 1]
    assert undo_depth(False, 0) == 1, "without an archive, only the last turn"
