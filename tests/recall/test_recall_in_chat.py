"""A chat that restores what each turn needs, and says so where it can't."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from attacking import MANY
from chatting import answer, babbler, notices, session, tell, text_at
from families import LATENT
from held_rows import contents, same
from recall_rounds import memory, talked
from session_files import columns
from sirchat.chat.events import Delta, Event, Notice, Recalled, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.turn import OpenTurn
from sirchat.memory.archive import Archive
from sirchat.memory.key_values import LostTokensError

UNHEARD = {"falcon", *LATENT} if MANY else {"falcon", "deepseek-mla"}


@pytest.mark.parametrize("family", sorted(UNHEARD))
def test_a_model_whose_attention_is_not_heard_recalls_by_keys_and_values(family: str) -> None:
    talked(memory(retriever="mips"), rounds=4, family=family)


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
        patch.setattr(Archive, "fetch", Mock(side_effect=LostTokensError("3 tokens are lost")))
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


FACT = "Our zebra is called Quixbert."


def recalling(*texts: str, **settings: Any) -> Session:
    """A chat in which recall has restored the fact."""
    usual: dict[str, Any] = {"policy": "sink", "budget": 160, "max_new_tokens": 20}
    chat = session(babbler(), **usual, recall="words", recall_n=40, **settings)
    for text in (*texts, *["other words " * 20] * 3, "Which zebra?"):
        list(chat.ask(text))
    assert chat.recall.scores
    return chat


def assert_held_for_two_turns(chat: Session, positions: np.ndarray) -> None:
    for text in ("Hello there.", "And now?"):
        assert np.isin(positions, chat.ledger.held_positions).all()
        list(chat.ask(text))
    assert np.isin(positions, chat.ledger.held_positions).all()


def test_what_is_pinned_while_recalled_stays_after_an_undo_that_keeps_pins() -> None:
    chat = recalling(FACT)
    recalled = np.asarray(list(chat.recall.scores))
    list(chat.ask("A zebra?"))
    chat.pin(recalled)
    chat.undo(to_ask_again=True)
    assert_held_for_two_turns(chat, recalled)


def test_a_system_prompt_that_is_pinned_while_recalled_is_held_whole_from_then_on() -> None:
    chat = recalling(system=FACT, pin_system=False)
    prompt = np.asarray(chat.state.system.positions)
    assert not np.isin(prompt, chat.ledger.held_positions).all()
    chat.switch("/set", pin_system=True)
    assert_held_for_two_turns(chat, prompt)


STORY = "Once a fox met a gate, which was old. It slept before the gate which led to a town. " * 14
QUESTION = "At which gate does my flight leave? " + "Flight seven, gate four, at noon. " * 5


def told(recall_n: int | str = 64) -> Session:
    """A chat with a long reply that shares words with the `QUESTION`, after a fact that fits it."""
    chat = session(babbler(), budget=256, recall="words", recall_n=recall_n, max_new_tokens=8)
    asked = "My flight seven leaves at noon for Oslo. Write a long story about a fox."
    tell(chat, asked, reply=STORY)
    return chat


# A number brings passages of the story back, too; `auto` only what fits better than they do.
@pytest.mark.parametrize("recall_n", [64, "auto"])
def test_the_message_just_written_is_held_beside_what_it_recalls(recall_n: int | str) -> None:
    chat = told(recall_n)
    events, held = list[Event](), list[int]()
    for event in chat.ask(QUESTION):
        events.append(event)
        held.append(chat.ledger.held_of_turn(2))
    (came,) = [event for event in events if isinstance(event, Recalled)]
    read, replied = [event for event in events if isinstance(event, TurnDone)]
    text = text_at(chat, came.positions)
    assert "for Oslo." in text
    assert ("met a gate" in text) == (recall_n == 64)
    assert read.tokens_in > 80
    assert read.recalled == replied.recalled == len(came.positions)
    assert held[events.index(read)] == held[-2] == read.tokens_in
    assert replied.resident <= 256


def test_no_part_of_the_budget_stands_empty_between_rounds() -> None:
    chat = told()
    for text in (QUESTION, "Tell me a joke.", "Where is the gate?"):
        asked = chat.ask(text)
        while not isinstance(next(asked), Delta):
            pass
        ended = chat.engine.store.placement
        list(asked)
        assert chat.resident > 256 - 16, "but for the block that a reply evicts"
        assert chat.snapshot().recalled == 0
        found = chat.recall.found
        assert found is not None
        assert set(ended.wanted.tolist()) >= set(ended.recalled.tolist()) == set(chat.recall.scores)
        assert found.passages, "what it was answered from is still known"


def test_attention_is_paid_to_what_was_recalled_and_nothing_changes() -> None:
    chat = told()
    list(chat.ask(QUESTION))
    before, rows = contents(chat.engine), columns(chat.ledger.rows())
    paid = chat.attention_paid(len(chat.turns) - 1)
    assert paid.shares is not None
    assert paid.held is not None
    assert paid.recalled == set(chat.recall.scores) <= paid.held
    assert set(paid.shares) & paid.recalled
    assert same(contents(chat.engine), before)
    assert columns(chat.ledger.rows()) == rows
