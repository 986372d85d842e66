"""Prompt lookup: the same tokens from fewer forward passes, and guesses that rest in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatting import tiny
from engine_steps import generate, prefill, some_ids
from families import loaded
from sirchat.engine.engine import Engine, Generation, PromptLookup
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken, TurnRef
from sirchat.memory.ledger import MovedRows
from sirchat.memory.policies import policy_class

few = st.lists(st.integers(0, 2), min_size=1, max_size=60)


@given(few, st.integers(0, 2), st.integers(0, 20), st.booleans())
def test_a_guess_is_what_followed_the_longest_match(
    ids: list[int], token_id: int, most: int, trusted: bool
) -> None:
    lookup = PromptLookup()
    if trusted:
        lookup.learn(3)
    found = lookup.guess(np.array(ids), token_id, most)
    text = [*ids, token_id]
    matches = [
        (length, end)
        for end in range(1, len(text))
        for length in range(3, 9)
        if end >= length and text[end - length : end] == text[len(text) - length :]
    ]
    length, end = max(matches, default=(0, 0))
    is_enough = length == 8 or (trusted and length >= 3)
    wanted = text[end : end + min(most, 15 if length == 8 else 5)] if is_enough else []
    assert found == (wanted if len(wanted) >= 3 else [])


def test_it_rests_longer_with_every_guess_in_vain_until_one_is_right() -> None:
    lookup, ids = PromptLookup(), np.array([*range(20), *range(9)])

    def tokens_until_a_guess() -> int:
        return next(count for count in range(1000) if lookup.guess(ids, 9, 9))

    rests = []
    for _ in range(7):
        rests.append(tokens_until_a_guess())
        lookup.learn(1)
    assert rests == [0, 8, 16, 32, 64, 128, 256]
    assert tokens_until_a_guess() == 256
    lookup.learn(5)
    assert tokens_until_a_guess() == 0
    lookup.learn(2)
    assert tokens_until_a_guess() == 8


STREAM = {"absolute_positions": True, "evict": "before-turn"}
SETTINGS = [
    pytest.param("entropy", {}, 0.0, id="evicting"),
    pytest.param("full", {}, 0.0, id="all held"),
    pytest.param("entropy", STREAM, 1.0, id="sampled, evicting by turn, at stream positions"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "options", "temperature"), SETTINGS)
def test_the_conversation_is_the_same_and_takes_fewer_passes(
    monkeypatch: pytest.MonkeyPatch, policy: str, options: dict[str, Any], temperature: float
) -> None:
    passes: list[int] = []
    model = tiny()
    forward = type(model).forward

    def counted(self: Any, ids: list[int], *args: Any, **kwargs: Any) -> Any:
        passes.append(len(ids))
        return forward(self, ids, *args, **kwargs)

    def conversation(lookup: bool) -> tuple[list[Any], list[float], int, list[int]]:
        settings = CacheSettings(policy_class(policy)(), budget=96, **options)
        engine = Engine(model, settings, seed=3)
        sampler = Sampler(Sampling(temperature=temperature, repetition_penalty=1.05))
        phrase, events, surprisals = some_ids(9, 5), list[Any](), list[float]()
        for turn in range(0, 6, 2):
            prefill(engine, [*phrase, *some_ids(3, turn), *phrase], turn)
            passes.clear()
            records = Generation(
                engine,
                sampler,
                TurnRef(turn + 1, turn // 2),
                stop_ids=frozenset(),
                max_new_tokens=60,
                lookup=PromptLookup() if lookup else None,
            )
            for record in records:
                assert engine.resident <= engine.budget
                if isinstance(record, GeneratedToken):
                    events.append(record.id)
                    surprisals.append(record.surprisal)
                elif isinstance(record, MovedRows) and not record.restored:
                    events.append(record.positions.tolist())
        return events, surprisals, len(passes), engine.ledger.held_positions.tolist()

    monkeypatch.setattr(type(model), "forward", counted)
    events, surprisals, many, held = conversation(lookup=False)
    again, others, fewer, same = conversation(lookup=True)
    assert (again, same) == (events, held)
    assert others == pytest.approx(surprisals, abs=1e-4)
    if temperature == 0:  # then so small a model says the same again and again
        assert fewer < 0.85 * many


def test_rows_whose_attention_counts_are_not_guessed() -> None:
    engine = Engine(loaded("llama"), CacheSettings(policy_class("h2o")(), budget=64))
    prefill(engine, [*some_ids(9, 5), *some_ids(9, 5)])
    lookup = PromptLookup()
    lookup.guess = lambda *args: pytest.fail("guessed")  # type: ignore[method-assign]
    generate(engine, 5, lookup=lookup)
