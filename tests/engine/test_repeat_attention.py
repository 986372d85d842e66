"""Rounds that are read a second time: the attention that their rows receive, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from families import loaded
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.memory.ledger import Role
from sirchat.memory.policies.kvzip import Kvzip
from sirchat.memory.policies.sink import Sink

KVZIP = CacheSettings(policy=Kvzip(), budget=200, archive=2**20)


def ids_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (count,), generator=generator).tolist()


def read(engine: Engine, ids: list[int], number: int) -> None:
    list(engine.prefill(ids, [Role.USER] * len(ids), TurnRef(number, number)))
    engine.decay_at_round_end()


def received(engine: Engine) -> np.ndarray:
    return engine.ledger.attention.repeat.of(np.arange(engine.ledger.seen))


def expected(ids: list[int], start: int, end: int, layers: tuple[int, ...]) -> torch.Tensor:
    """From one pass without a cache: ids start to end are read behind `ids`, and look back."""
    module = loaded("llama").module
    usual = module.config._attn_implementation
    module.set_attn_implementation("eager")
    tokens = torch.tensor([[*ids, *ids[start:end]]])
    with torch.inference_mode():
        found = module(tokens, output_attentions=True, use_cache=False).attentions
    module.set_attn_implementation(usual)
    weights = torch.stack([found[layer][0] for layer in layers])  # [L, H, n + m, n + m]
    return weights[:, :, len(ids) :, start:end].amax(2).mean((0, 1))


@pytest.mark.parametrize(("option", "layers"), [(0, (0, 1, 2, 3)), (2, (1, 3))])
def test_it_is_the_highest_weight_from_the_second_reading(
    option: int, layers: tuple[int, ...]
) -> None:
    engine = Engine(loaded("llama"), replace(KVZIP, policy=Kvzip(layers=option)))
    first, second = ids_of(30, 1), ids_of(20, 2)
    read(engine, first, 1)
    read(engine, second, 2)
    wanted = torch.cat(
        (expected(first, 0, 30, layers), expected([*first, *second], 30, 50, layers))
    )
    assert received(engine) == pytest.approx(wanted.double().numpy(), abs=1e-5)


def test_a_long_round_is_read_again_in_pieces() -> None:
    engine = Engine(loaded("llama"), KVZIP)
    ids = ids_of(80, 3)
    read(engine, ids, 1)
    size = engine.residency.divide_budget().chunk_size
    assert 0 < size < 80
    parts = [
        expected(ids, start, min(80, start + size), (0, 1, 2, 3)) for start in range(0, 80, size)
    ]
    assert received(engine) == pytest.approx(torch.cat(parts).double().numpy(), abs=1e-5)


def test_the_second_reading_changes_nothing_else() -> None:
    ours, other = (
        Engine(loaded("llama"), replace(KVZIP, policy=policy)) for policy in (Kvzip(), Sink())
    )
    for number in range(3):
        for engine in (ours, other):
            read(engine, ids_of(30, number), number)
    assert ours.ledger.seen == other.ledger.seen == 90
    for name in ("token_id", "round", "surprisal", "birth_decay", "state"):
        mine, theirs = ours.ledger.column(name), other.ledger.column(name)
        assert np.array_equal(mine, theirs, equal_nan=name == "surprisal")
    assert torch.equal(ours.logits, other.logits)  # type: ignore[arg-type]
    for layer in range(4):
        assert torch.equal(ours.cache.layer_keys(layer), other.cache.layer_keys(layer))
    assert not received(other).any()


def test_what_the_model_looks_at_stays_and_the_budget_holds() -> None:
    engine = Engine(loaded("llama"), replace(KVZIP, policy=Kvzip(recent=0), budget=48))
    for number in range(8):
        read(engine, ids_of(20, number), number)
        assert engine.resident <= 48
    rows = engine.ledger.held_positions
    assert (received(engine)[rows] > 0).all()


def test_undo_goes_back_to_what_was_known_then() -> None:
    engine = Engine(loaded("llama"), KVZIP)
    read(engine, ids_of(30, 1), 1)
    before, point = received(engine), engine.checkpoint()
    read(engine, ids_of(30, 2), 2)
    engine.undo(point)
    assert np.array_equal(received(engine), before)
    read(engine, ids_of(30, 2), 2)
    again = Engine(loaded("llama"), KVZIP)
    read(again, ids_of(30, 1), 1)
    read(again, ids_of(30, 2), 2)
    assert np.array_equal(received(engine), received(again))


def test_rounds_read_under_another_policy_count_as_the_median() -> None:
    engine = Engine(loaded("llama"), replace(KVZIP, policy=Sink()))
    read(engine, ids_of(20, 1), 1)
    engine.residency.switch(KVZIP)
    read(engine, ids_of(21, 2), 2)
    rows = engine.residency.view(None)
    score = Kvzip(whole_words=False, template=False).score(rows).exp()
    known = np.sort(received(engine)[20:])
    assert score[:20].tolist() == pytest.approx([known[10]] * 20)
