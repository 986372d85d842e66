"""A chat that restores what each turn needs, and says so where it can't."""

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import Mock

import pytest

from chatting import answer, session
from families import LATENT
from recall_rounds import memory, talked
from sirchat.chat.events import Delta, Event, Notice, Recalled, TurnDone
from sirchat.chat.turn import OpenTurn
from sirchat.memory.archive import Archive

UNHEARD = {"falcon", *LATENT}


@pytest.mark.parametrize("family", sorted(UNHEARD))
def test_a_model_whose_attention_is_not_heard_recalls_by_keys_and_values(family: str) -> None:
    talked(memory(retriever="mips"), rounds=5, family=family)


@pytest.mark.slow
def test_tiny_answers_from_what_came_back() -> None:
    chat = session(policy="sink", budget=96, seed=1)
    for text in ("My name is Anna.", "I live in Lisbon."):
        list(chat.ask(text))
    for number in range(12):
        list(chat.ask(("What is the opposite of hot?", "Tell me a joke.")[number % 2]))
    assert answer(list(chat.ask("Where do I live?"))) != "You live in Lisbon."
    chat.undo()
    chat.switch("/recall", recall="cosine", budget=160, recall_n=64)
    before = set(chat.ledger.held_positions.tolist())
    asked = chat.ask("Where do I live?")
    events = [next(asked)]
    while not isinstance(events[-1], Delta):
        events.append(next(asked))
    ended = chat.engine.store.placement
    events += asked
    assert answer(events) == "You live in Lisbon."
    (came,) = [one for one in events if isinstance(one, Recalled)]
    assert len(ended.wanted) == 64
    # What was held already stays; reading the question may have evicted it, so that it was found.
    assert set(came.positions) == set(ended.wanted.tolist()) - before
    assert set(came.positions) == set(ended.recalled.tolist())
    assert len(came.positions) == len(came.scores)
    assert came.released == ()
    assert came.resident <= 160
    told = [one.recalled for one in events if isinstance(one, TurnDone)]
    assert told == [len(came.positions)] * 2
    assert chat.snapshot().recalled == 0
    assert tuple(chat.recall.scores) == came.positions
    again = [one for one in chat.ask("Tell me a joke.") if isinstance(one, Recalled)]
    assert again[0].released == came.positions


def test_a_search_for_tokens_that_are_lost_ends_with_a_notice_and_the_turn_goes_on() -> None:
    chat = session(policy="sink", budget=64, recall="cosine", recall_n=20)
    for _ in range(6):
        list(chat.ask("Tell me a joke."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Archive, "fetch", Mock(side_effect=LookupError("3 tokens are lost")))
        events = list(chat.ask("Tell me a joke."))
    (notice,) = [one for one in events if isinstance(one, Notice)]
    assert "no token can be restored" in notice.text
    assert answer(events)


def test_what_stepped_aside_is_back_if_the_end_of_a_given_reply_is_not_read() -> None:
    chat = session(policy="sink", budget=64, recall="cosine", recall_n=20)
    for _ in range(6):
        list(chat.ask("Tell me a joke."))
    list(chat.read_user("Tell me a joke."))
    assert chat.engine.store.has_recall
    reply = chat.read_reply("No.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenTurn, "close", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(reply)
    assert not chat.engine.store.has_recall


def notices(events: Iterable[Event]) -> list[str]:
    return [one.text for one in events if isinstance(one, Notice)]


def test_who_asks_for_more_than_the_budget_has_room_for_is_told() -> None:
    told = [
        "budget 96 leaves room to restore only 84 tokens, not recall_n = 200; "
        "raise the budget or lower recall_n"
    ]
    chat = session(policy="sink", budget=96, recall="mips", recall_n=200)
    assert notices(chat.opening_events()) == told
    assert notices(chat.switch("/decay", decay=0.9)) != told
    assert notices(chat.switch("/set", recall_n=60)) == []
    assert notices(chat.switch("/set", recall_n=200)) == told
    assert notices(chat.switch("/budget", budget=400)) == []
    assert notices(chat.switch("/policy", policy="full")) == []
    assert notices(session(policy="sink", budget=96, recall_n=200).opening_events()) == []


def test_a_prompt_that_is_pinned_while_much_is_recalled_stays_within_the_budget() -> None:
    chat = session(budget=40, sinks=1, recall="mips", recall_n=24, max_new_tokens=14)
    for text in ("My name is Anna and I live in Oslo.", "My favourite colour is green.", "ok"):
        list(chat.ask(text))
    assert chat.recall.scores
    chat.switch("/system", system="Speak like a sailor.")
    assert chat.resident <= 40
