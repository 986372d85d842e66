"""A question about what was told is answered from what recall finds; then all is as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from chatting import babbler, session, tell, text_at, tiny
from random_encoders import random_encoder
from sirchat.chat.events import Event, Recalled, TurnDone
from sirchat.chat.session import Session
from sirchat.lab.studies.reading import read
from sirchat.models.model import LoadedModel
from sirchat.recall.passages import MIN_SCORE
from sirchat.recall.recall import MIN_SHARE_OF_BEST, NewTurn
from sirchat.recall.word_index import DISCOUNT

TOLD, ASKED = "Our zebra is called Quixbert.", "Who is our zebra Quixbert?"
TALK = ("What a rainy day it is.", "Tell me a joke.", "The bus was late again.", "How are you?")
SPAN = 64  # numbers in a vector


@cache
def asking(focus: str = "on") -> LoadedModel:
    """A model with random weights whose encoder takes `ASKED` alone for a question."""
    model = babbler()
    model = replace(model, encoder=random_encoder(model, (1,), SPAN))
    chat = session(model, policy="full")
    turns = [chat.template.opening(text)[1] for text in (ASKED, TOLD, *TALK)]
    x = torch.stack([model.encode(turn.ids[: turn.content[1]], turn.content[0]) for turn in turns])
    x = torch.nn.functional.pad(x, (0, 1), value=1.0)
    wanted = torch.tensor([1.0, *[-1.0] * (len(turns) - 1)])
    weight = torch.linalg.lstsq(x, wanted[:, None]).solution[:, 0]
    return replace(model, encoder=replace(model.encoder, question=weight, about={"focus": focus}))


def told(budget: int = 1024, model: LoadedModel | None = None) -> Session:
    chosen = model or asking()
    chat = session(chosen, policy="sink", budget=budget, recall="on", max_new_tokens=8)
    tell(chat, TOLD, *TALK * 4)
    return chat


def contents(chat: Session) -> tuple[list[int], list[torch.Tensor]]:
    """What the cache holds, and its keys and values as the model reads them."""
    cache = chat.engine.cache
    rows = cache.as_read(torch.arange(cache.length))
    return chat.ledger.held_positions.tolist(), [one.clone() for one in rows]


def held_in_reply(chat: Session, text: str) -> tuple[set[int], list[Event]]:
    """The positions that are held when the reply begins, and all events."""
    events, held = list[Event](), set[int]()
    for event in chat.ask(text):
        events.append(event)
        if isinstance(event, TurnDone) and event.role == "user":
            held = set(chat.ledger.held_positions.tolist())
    return held, events


def test_a_question_is_answered_from_sinks_newest_round_and_what_was_found() -> None:
    chat = told()
    seen, round_ = chat.seen, int(chat.ledger.column("round").max())
    newest = np.flatnonzero(chat.ledger.column("round") == round_)
    held, events = held_in_reply(chat, ASKED)
    (recalled,) = [event for event in events if isinstance(event, Recalled)]
    assert recalled.focused
    assert TOLD.split()[-1] in text_at(chat, recalled.positions)
    assert {at for at in held if at < seen} == {*range(4), *newest.tolist(), *recalled.positions}


@pytest.mark.parametrize("budget", [1024, 96])
def test_then_all_is_back_bit_for_bit(budget: int) -> None:
    chat = told(budget)
    before, seen = contents(chat), chat.seen
    held_in_reply(chat, ASKED)
    held, rows = contents(chat)
    kept = [at for at in before[0] if at in held]
    if budget == 1024:
        assert kept == before[0]
    at_now = [held.index(at) for at in kept]
    at_then = [before[0].index(at) for at in kept]
    if at_now == at_then:  # else their slots, and so their rotations, differ
        for now, then in zip(rows, before[1], strict=True):
            assert torch.equal(now[:, at_now], then[:, at_then])
    assert max(held) == chat.seen - 1 >= seen


def test_undone_it_never_was() -> None:
    chat = told()
    before, held = contents(chat), held_in_reply(chat, TALK[0])[0]
    chat.undo()
    held_in_reply(chat, ASKED)
    chat.undo()
    for now, then in zip(contents(chat)[1], before[1], strict=True):
        assert torch.equal(now, then)
    assert contents(chat)[0] == before[0]
    assert held_in_reply(chat, TALK[0])[0] == held


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        (
            asking,
            [
                (TALK[0], {}, True),
                (ASKED, {"focus": "off"}, True),
                (ASKED, {"recall": "words"}, True),
                (ASKED, {"policy": "full"}, True),
            ],
        ),
        # a model that uses its whole context
        (partial(asking, "off"), [(ASKED, {}, True), (ASKED, {"focus": 32}, False)]),
        # without an encoder, a number says yes for questions
        (
            babbler,
            [
                (ASKED, {}, True),
                (ASKED, {"focus": 32}, False),
                (ASKED.rstrip("?") + ".", {"focus": 32}, True),
                (ASKED, {"focus": 32, "policy": "full"}, True),
            ],
        ),
    ],
)
def test_all_is_held_for_other_messages_under_other_settings_and_by_other_models(
    model: Callable[[], LoadedModel], cases: list[tuple[str, dict[str, Any], bool]]
) -> None:
    chat = told(model=model())
    every = set(range(chat.seen))
    for text, settings, is_held in cases:
        own = {name: getattr(chat.profile, name) for name in settings}
        chat.switch("test", **settings)
        assert (held_in_reply(chat, text)[0] >= every) is is_held, (text, settings)
        chat.undo()
        chat.switch("test", **own)


def test_passages_that_fit_much_less_than_the_best_are_left_out() -> None:
    chat = told()
    tell(chat, "A zebra ran.", "He has a zebra and a dog.")
    chat.recall.update()
    turn = chat.template.user_turn(ASKED)
    found = chat.recall.find(NewTurn(turn.ids, turn.roles), 1000)
    scores = chat.recall.passage_search.scores(found.query)
    near = {
        number
        for number, score in enumerate(scores)
        if score >= MIN_SHARE_OF_BEST * found.best_score
    }
    assert found.is_question
    assert set(found.passages) == near
    assert (scores[[n not in near for n in range(len(scores))]] >= DISCOUNT * MIN_SCORE).any()


def test_a_question_without_room_beside_it_is_not_answered_from_nothing() -> None:
    chat = session(tiny(), policy="sink", budget=40, recall="words", focus=40)
    read(chat, "My name is Anna.", "Nice to meet you, Anna.")
    for number in range(6):
        read(chat, f"We walked to lake {number}.", "How was it?")
    list(chat.read_user(" ".join(["What is my name?"] * 8)))
    found = chat.recall.found
    assert found is not None
    assert (found.passages, len(found.positions), found.is_question) == ((), 0, False)
