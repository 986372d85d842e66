"""Rounds of an engine that evicts tokens and recalls archived ones."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from families import loaded
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, RecallSettings, TurnRef
from sirchat.memory.key_values import KeyValues
from sirchat.memory.ledger import Role
from sirchat.memory.policies import policy_class
from sirchat.memory.rope import Rotation
from sirchat.models.model import LoadedModel
from sirchat.recall.recall import SearchResult, best_tokens, score_by_reading_turn


def memory(policy: str = "sink", budget: int = 66, **options: object) -> CacheSettings:
    recall = RecallSettings(**{"retriever": "mips", "n": 30, **options})  # type: ignore[arg-type]
    return CacheSettings(policy_class(policy)(), budget, archive=10**9, recall=recall)


def some_ids(turn: int, count: int) -> list[int]:
    return random.Random(turn).choices(range(3, 128), k=count)


def find(engine: Engine, model: LoadedModel, ids: list[int], turn: int) -> SearchResult | None:
    roles = [Role.USER] * len(ids)
    return score_by_reading_turn(engine, model, ids, roles, TurnRef(turn, turn))


def say(engine: Engine, model: LoadedModel, turn: int, count: int = 20) -> SearchResult | None:
    """Read a turn as a session does: search the archive, recall, read."""
    ids = some_ids(turn, count)
    found = find(engine, model, ids, turn) if engine.settings.recall else None
    if found is not None:
        restore(engine, found, count)
    for _ in engine.prefill(ids, [Role.USER] * count, TurnRef(turn, turn)):
        assert engine.resident <= engine.budget
    engine.evictor.end_recall()
    engine.decay_at_round_end()
    return found


def talked(
    first: CacheSettings, rounds: int = 8, family: str = "llama"
) -> tuple[Engine, LoadedModel]:
    model = loaded(family)
    engine = Engine(model, first)
    for turn in range(rounds):
        say(engine, model, turn)
    return engine, model


def as_if_at_zero(given: KeyValues, tensor: int, rotation: Rotation | None) -> Tensor:
    """One key or value after the other, rotated back from where it was written: [H, n, D]."""
    out = []
    for at, one in zip(given.written_at.tolist(), given.tensors[tensor].unbind(1), strict=True):
        if rotation is not None:
            back = rotation.cos_sin(torch.tensor([at]), torch.tensor([0]))
            one = rotation.apply(one[:, None], *back)[:, 0]
        out.append(one)
    return torch.stack(out, 1).double()


def restore(engine: Engine, found: SearchResult, incoming: int) -> None:
    """Restore the best of the tokens found, for a turn of so many ids."""
    best = best_tokens(found, engine.evictor.recall_room(incoming), np.zeros(0, np.int64))
    engine.evictor.begin_recall(best.positions, incoming=incoming, scores=best.scores)
