"""The message that is answered comes first; what recall does not need, the policy has."""

from __future__ import annotations

import pytest

from chatting import babbler, session
from held_rows import contents, same
from session_files import columns
from sirchat.chat.events import Delta, Event, Recalled, TurnDone
from sirchat.chat.session import Session

STORY = "Once a fox met a gate, which was old. It slept before the gate which led to a town. " * 14
QUESTION = "At which gate does my flight leave? " + "Flight seven, gate four, at noon. " * 5


def told(recall_n: int | str = 64) -> Session:
    """A chat with a long reply that shares words with the `QUESTION`, after a fact that fits it."""
    chat = session(babbler(), budget=256, recall="words", recall_n=recall_n, max_new_tokens=8)
    list(chat.read_user("My flight seven leaves at noon for Oslo. Write a long story about a fox."))
    list(chat.read_reply(STORY))
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
    text = "".join(row.text for row in chat.tokens(came.positions))
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
