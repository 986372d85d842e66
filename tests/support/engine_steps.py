"""Single steps of an engine: read, generate, and check that its parts agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from families import BigramModel
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import (
    GeneratedToken,
    ReadProgress,
    Stopped,
    TurnRef,
)
from sirchat.memory.ledger import MovedRows, Role

Record = ReadProgress | GeneratedToken | MovedRows | Stopped
CONTEXT = 300  # context length of a bigram model

SAMPLER = Sampler(Sampling(temperature=1.0, seed=1))


def prefill(engine: Engine, ids: Sequence[int], turn: int = 0, **options: Any) -> list[Record]:
    turn_ref = TurnRef(turn, turn // 2)
    return list(engine.prefill(ids, [Role.USER] * len(ids), turn_ref, **options))


def generate(engine: Engine, count: int, turn: int = 1, **options: Any) -> list[Record]:
    sampler: Sampler = options.pop("sampler", SAMPLER)
    options = {"stop_ids": frozenset(), "max_new_tokens": count, **options}
    return list(Generation(engine, sampler, TurnRef(turn, turn // 2), **options))


def some_ids(count: int, seed: float = 0, vocab: int = 128) -> list[int]:
    return random.Random(seed).choices(range(3, vocab), k=count)


def evicted(records: Sequence[Record]) -> list[list[int]]:
    return [
        record.positions.tolist()
        for record in records
        if isinstance(record, MovedRows) and not record.restored
    ]


def check_whole(engine: Engine) -> None:
    """Cache and ledger hold the same rows, within the budget, or the context between turns."""
    held = engine.ledger.held_positions
    assert engine.resident == engine.cache.length == engine.ledger.held_count == len(held)
    between_turns = engine.settings.evict == "between-turns"
    assert engine.resident <= (CONTEXT if between_turns else engine.budget)
    assert (np.diff(held) > 0).all()
    ids = engine.ledger.column("token_id")[held].tolist()
    for layer in range(len(engine.cache.row_layers) if len(held) else 0):
        for view in (engine.cache.layer_keys, engine.cache.layer_values):
            assert view(layer)[0, 0, :, 0].tolist() == ids


def state_of(engine: Engine) -> tuple[Any, ...]:
    ledger = engine.ledger
    return ledger.seen, ledger.held_positions.tolist(), engine.settings, id(engine.logits)


@dataclass
class failing:
    """As a context: the model raises ZeroDivisionError when this layer writes to the cache."""

    model: BigramModel
    layer: int

    def __enter__(self) -> None:
        def fail(layer: int, ids: Sequence[int]) -> None:
            if layer == self.layer:
                raise ZeroDivisionError

        self.model.before_layer = fail  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.model.before_layer
