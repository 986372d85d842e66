"""A pass that fails leaves no trace, and one too large for the memory is halved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine_steps import check_whole, evicted, failing, prefill, some_ids, state_of
from families import BigramModel
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings
from sirchat.memory.policies.entropy import Entropy


@pytest.mark.parametrize("layer", range(BigramModel.layers))
def test_a_failed_pass_leaves_no_trace(layer: int) -> None:
    model, spared = BigramModel(), BigramModel()
    engine, other = (Engine(m, CacheSettings(Entropy(), budget=64)) for m in (model, spared))
    for e in (engine, other):
        prefill(e, some_ids(40))
    before = state_of(engine)
    with failing(model, layer), pytest.raises(ZeroDivisionError):
        prefill(engine, some_ids(10, seed=9), turn=2)
    assert state_of(engine) == before
    check_whole(engine)
    for e in (engine, other):
        prefill(e, some_ids(30, seed=2), turn=2)
    check_whole(engine)
    assert_same_conversation(engine, other)


@pytest.mark.parametrize("fits", [1, 2, 5, 11])
def test_out_of_memory_halves_the_pass_and_evicts_the_same(fits: int) -> None:
    small, large = BigramModel(), BigramModel()

    def out_of_memory(layer: int, ids: Sequence[int]) -> None:
        if len(ids) > fits and layer == 1:
            raise torch.OutOfMemoryError

    small.before_layer = out_of_memory  # type: ignore[method-assign]
    engine, other = (
        Engine(m, CacheSettings(Entropy(), budget=64, sinks=0)) for m in (small, large)
    )
    for turn in range(0, 8, 2):
        ids = some_ids(50, turn)
        assert evicted(prefill(engine, ids, turn)) == evicted(prefill(other, ids, turn))
        check_whole(engine)
    assert max(map(len, small.passes)) <= fits
    assert_same_conversation(engine, other)


def test_out_of_memory_with_a_single_token_is_an_error() -> None:
    model = BigramModel()

    def out_of_memory(layer: int, ids: Sequence[int]) -> None:
        raise torch.OutOfMemoryError

    model.before_layer = out_of_memory  # type: ignore[method-assign]
    engine = Engine(model, CacheSettings(Entropy(), budget=64))
    with pytest.raises(torch.OutOfMemoryError):
        prefill(engine, some_ids(20))
    assert engine.ledger.seen == engine.resident == 0


def assert_same_conversation(engine: Engine, other: Engine) -> None:
    assert engine.ledger.held_positions.tolist() == other.ledger.held_positions.tolist()
    for name in ("token_id", "round", "arrival_key", "state"):
        assert engine.ledger.column(name).tolist() == other.ledger.column(name).tolist()
    mine, theirs = (e.ledger.column("surprisal").tolist() for e in (engine, other))
    assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    assert engine.logits is not None
    assert other.logits is not None
    assert torch.equal(engine.logits, other.logits)
