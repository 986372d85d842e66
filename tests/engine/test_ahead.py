"""A GPU that reads one token ahead of the host comes to what a host does that waits for each."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacking import MANY
from captured import captured
from engine_steps import generate, prefill, some_ids
from families import build
from random_encoders import random_encoder
from sirchat.engine.engine import Engine, Generation, PromptLookup, step
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import (
    CacheSettings,
    GeneratedToken,
    Stopped,
    TurnRef,
)
from sirchat.memory.policies.by_chance import Reservoir
from sirchat.memory.policies.by_position import Full, Sink
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.captured_step import CapturedStep
from sirchat.models.model import wrap_model

VOCAB = 24
MODEL = wrap_model(
    "small",
    build("llama", {"num_hidden_layers": 2, "vocab_size": VOCAB, "tie_word_embeddings": True}),
    None,
)
MODEL = replace(MODEL, encoder=random_encoder(MODEL, (1, 2)))
POLICIES = [Entropy(), Sink(), Reservoir(), Full()]
SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.5, repetition_window=3),
    Sampling(temperature=1.5, top_p=0.8, repetition_penalty=1.1, repetition_window=8, seed=5),
    Sampling(temperature=1.0, top_k=5, seed=2),
    Sampling(temperature=2.0, seed=3),
    Sampling(temperature=0.7, repetition_penalty=1.2, repetition_window=64, seed=4),
]

turns = st.fixed_dictionaries(
    {
        "read": st.integers(1, 12),
        "count": st.integers(0, 12),
        "sampling": st.integers(0, len(SAMPLINGS) - 1),
        "stops": st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
        "end": st.sampled_from(["all", "interrupt", "close", "other", "together"]),
        "after": st.integers(0, 8),
        "lookup": st.booleans(),
        "then": st.sampled_from(["nothing", "undo", "switch", "recall", "resume", "decay"]),
        "choice": st.integers(0, 999),
    }
)


def new_engine(budget: int = 24, policy: Any = POLICIES[0], absolute: bool = False) -> Engine:
    cache = CacheSettings(policy, budget, archive=2**24, absolute_positions=absolute)
    engine = Engine(MODEL, cache, seed=1)
    engine.ledger.token_vectors.wanted = True
    return engine


class Play:
    """Plays turns, and records what a caller of the engine sees."""

    def __init__(self, engine: Engine, step: CapturedStep, *, ahead: bool) -> None:
        self.engine, self.step, self.ahead = engine, step, ahead
        self.records = list[Any]()
        self.other = new_engine()  # another conversation with the same model
        prefill(self.other, [1, 2, 3])

    def take(self, number: int, turn: dict[str, Any]) -> None:
        engine = self.engine
        before = engine.checkpoint()
        prefill(engine, some_ids(turn["read"], number, VOCAB), number)
        with pytest.MonkeyPatch.context() as patch:
            if not self.ahead:
                patch.setattr("sirchat.engine.reader.device_choice", lambda *_: None)
            self.reply(number, turn)
        getattr(self, turn["then"])(before, np.random.default_rng(turn["choice"]))

    def reply(self, number: int, turn: dict[str, Any]) -> None:
        tokens, ends, is_over = 0, turn["end"], False
        reply = Generation(
            self.engine,
            Sampler(SAMPLINGS[turn["sampling"]]),
            TurnRef(number, number),
            stop_ids=turn["stops"],
            max_new_tokens=turn["count"],
            lookup=PromptLookup() if turn["lookup"] else None,
        )
        at = TurnRef(0, 0)
        partner = Generation(
            *(self.other, Sampler(Sampling()), at), stop_ids=frozenset(), max_new_tokens=99
        )
        reply.begin()
        partner.begin()
        with closing(reply), closing(partner):
            while not is_over and not (ends in ("interrupt", "close") and tokens >= turn["after"]):
                both = ends == "together" and tokens >= turn["after"]
                done = step([reply, partner] if both else [reply])[0]
                assert done.error is None
                for record in done.records:
                    is_over |= isinstance(record, Stopped)
                    tokens += isinstance(record, GeneratedToken)
                    is_token = isinstance(record, GeneratedToken | Stopped)
                    self.records.append(record if is_token else repr(record))
                if ends == "other" and (tokens == turn["after"] or len(done.records) > 1):
                    self.use_device()

    def use_device(self) -> None:
        """Let another conversation generate with the same device."""
        generate(self.other, 2, turn=0, sampler=Sampler(Sampling()))

    def nothing(self, before: Any, random: Any) -> None: ...

    def undo(self, before: Any, random: Any) -> None:
        self.engine.undo(before)

    def decay(self, before: Any, random: Any) -> None:
        self.engine.decay_at_round_end()

    def switch(self, before: Any, random: Any) -> None:
        policy = POLICIES[random.integers(3)]
        changed = replace(self.engine.settings, policy=policy, budget=int(random.integers(16, 40)))
        self.engine.switcher.switch(changed)

    def recall(self, before: Any, random: Any) -> None:
        archived = self.engine.store.archive.positions[:2]
        self.engine.evictor.begin_recall(archived, incoming=0)
        self.engine.evictor.end_recall()

    def resume(self, before: Any, random: Any) -> None:
        engine = self.engine
        saved, rows = engine.save(), engine.store.copy_key_values()
        self.engine = Engine(MODEL, engine.settings, seed=1)
        self.engine.ledger.token_vectors.wanted = True
        self.engine.load(saved, rows)


def assert_same_vectors(one: Engine, two: Engine) -> None:
    here, there = one.ledger.token_vectors, two.ledger.token_vectors
    for at in range(one.ledger.seen):
        mine, yours = here.mean(at, at + 1), there.mean(at, at + 1)
        assert (mine is None) == (yours is None), at
        if mine is not None and yours is not None:
            torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


def assert_equal(one: Engine, two: Engine) -> None:
    for name in one.ledger.rows().dtype.names or ():
        here, there = one.ledger.column(name), two.ledger.column(name)
        assert np.array_equal(here, there, equal_nan=here.dtype.kind == "f"), name
    assert np.array_equal(one.ledger.held_positions, two.ledger.held_positions)
    assert one.cache.length == two.cache.length
    assert_same_vectors(one, two)
    mine, yours = one.logits, two.logits
    assert (mine is None) == (yours is None)
    assert mine is None or yours is None or torch.equal(mine, yours)
    held = torch.arange(one.cache.length)
    if one.cache.length:
        for one_rows, other in zip(one.cache.as_read(held), two.cache.as_read(held), strict=True):
            assert torch.equal(one_rows, other)


@pytest.mark.slow
@settings(max_examples=MANY or 6, deadline=None)
@given(
    played=st.lists(turns, min_size=1, max_size=4),
    budget=st.integers(16, 40),
    policy=st.sampled_from(POLICIES),
    absolute=st.booleans(),
)
def test_reading_ahead_comes_to_the_same(
    played: list[dict[str, Any]], budget: int, policy: Any, absolute: bool
) -> None:
    """`SIRCHAT_ATTACK=2000` tries so many conversations."""
    plays = []
    for ahead in (True, False):
        with captured(MODEL) as step:
            play = Play(new_engine(budget, policy, absolute), step, ahead=ahead)
            for number, turn in enumerate(played):
                play.take(number, turn)
        plays.append(play)
    one, two = plays
    assert one.records == two.records
    assert_equal(one.engine, two.engine)
    assert_equal(one.other, two.other)
