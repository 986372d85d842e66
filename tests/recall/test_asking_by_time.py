"""A message that asks, and names a time, is answered from what the user said then."""

from __future__ import annotations

import time

import pytest

from chatting import babbler, session, smollm2
from sirchat.chat.session import Session
from sirchat.models.model import LoadedModel

TALK = ("What a rainy week.", "The bus was late again.", "It is cold in here.")
DAYS = (5, 3, 1)
TOLD = dict(
    zip(DAYS, ("A walnut fell.", "We painted the fence.", "The kettle broke."), strict=True)
)


def chat_of_days(
    model: LoadedModel, recall: str, talk: tuple[str, ...] = TALK, budget: int = 160
) -> Session:
    """What was told five, three and one days ago, each followed by talk; none of it is held."""
    chat = session(model, policy="sink", budget=budget, recall=recall, recall_n="auto", focus="off")
    for days in DAYS:
        for text in (TOLD[days], *talk):
            list(chat.read_user(text))
            list(chat.read_reply("Fine, thank you, that is good to know. " * (budget // 50)))
            chat.turns[-2].time = chat.turns[-1].time = int(time.time()) - days * 24 * 3600
    return chat


def found(chat: Session, text: str) -> list[str]:
    """The passages that are found for a message, which is then undone; best first."""
    list(chat.read_user(text))
    search, found = chat.recall.passage_search.passages, chat.recall.found
    assert found is not None
    texts = [search.texts(chat.ledger, number, number + 1)[0] for number in found.passages]
    chat.undo()
    return texts


def test_what_was_said_then_is_found_and_nothing_of_other_days() -> None:
    chat = chat_of_days(babbler(), "words")
    for asked, days in (
        ("What did I tell you yesterday?", 1),
        ("Is it what I said 3 days ago?", 3),
    ):
        assert set(found(chat, asked)) == {TOLD[days], *TALK}
    assert set(found(chat, "What was the first thing that I told you?")) == {TOLD[5], TALK[0]}
    assert found(chat, "What did I tell you last?")[0] == TALK[-1]
    # Without an encoder, only a question mark tells that a message asks.
    assert found(chat, "I met her yesterday.") == []


@pytest.mark.slow
@pytest.mark.real
def test_a_real_model_tells_a_question_from_a_statement() -> None:
    chat = chat_of_days(smollm2(), "meaning", TALK[:1], 96)
    assert set(found(chat, "What did I tell you yesterday?")) >= {TOLD[1], TALK[0]}
    assert TOLD[1] not in found(chat, "I met her yesterday at the station.")
    assert found(chat, "What broke in the kitchen yesterday?")[0] == TOLD[1]
