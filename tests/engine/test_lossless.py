"""Nothing is lost: a switch restores what was evicted, and a turn is undone bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from families import loaded
from held_rows import contents, same
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, EvictedRows, RestoredRows, TurnRef
from sirchat.memory.ledger import Role
from sirchat.memory.policies import policy_class, policy_names
from sirchat.memory.policies.sink import Sink

BOUNDED = [name for name in policy_names() if policy_class(name).bounded]
PLENTY = 10**9


def memory(policy: str = "entropy", budget: int = 64, archive: int = PLENTY) -> CacheSettings:
    return CacheSettings(policy_class(policy)(), budget, archive=archive)


def talked(first: CacheSettings, family: str = "llama", rounds: int = 6, **options: Any) -> Engine:
    """An engine after some rounds of 40 ids."""
    engine = Engine(loaded(family, **options), first)
    for turn in range(rounds):
        talk(engine, turn)
    return engine


def talk(engine: Engine, turn: int, count: int = 40) -> None:
    ids = random.Random(turn).choices(range(3, 128), k=count)
    list(engine.prefill(ids, [Role.USER] * count, TurnRef(turn, turn)))
    engine.decay_at_round_end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "one"),
    [*(("llama", one) for one in BOUNDED), ("deepseek-mla", "h2o"), ("gemma2", "h2o")],
)
def test_there_and_back_with_nothing_said_is_as_if_never_switched(family: str, one: str) -> None:
    engine = talked(memory(one), family, rounds=4)
    before = contents(engine)
    for other in set(BOUNDED) - {one}:
        engine.evictor.switch(memory(other))
        engine.evictor.switch(memory(one))
        assert same(contents(engine), before), other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_gives_the_same_logits(dtype: torch.dtype) -> None:
    straight, switched = (talked(memory("reservoir"), dtype=dtype) for _ in range(2))
    for policy, budget in (("sink", 32), ("entropy", 200), ("window", 48), ("reservoir", 64)):
        switched.evictor.switch(memory(policy, budget))
    for engine in (straight, switched):
        talk(engine, 9, count=7)
    assert straight.logits is not None
    assert switched.logits is not None
    assert torch.equal(straight.logits, switched.logits)


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_a_larger_budget_holds_what_it_would_choose_from_everything(policy: str) -> None:
    engine = talked(memory(policy, 64))
    seen = engine.ledger.seen
    records = engine.evictor.switch(memory(policy, 150))
    at = np.arange(seen)
    sinks = engine.settings.sinks if engine.settings.policy.honours_sinks else 0
    newest = at >= seen - (150 - sinks) // 2
    protected = (at < sinks) | (newest & (engine.ledger.column("round") == 5))
    view = engine.ledger.view(at, sinks=sinks, protected=protected)
    stats: dict[Any, Any] = engine.store.statistics(at, engine.settings.policy.key_value_stats)
    view = replace(view, **stats)
    assert engine.ledger.held_positions.tolist() == engine.settings.policy.keep(view, 150).tolist()
    assert sum(len(r.positions) for r in records if isinstance(r, RestoredRows)) >= 86


def test_all_read_evicted_and_brought_back_is_as_if_nothing_had_left() -> None:
    roomy = talked(memory("sink", 250))
    full = contents(roomy)
    roomy.evictor.switch(memory("sink", 24))
    assert roomy.resident == 24
    assert not np.isin(np.arange(30, 100), roomy.ledger.held_positions).any()
    records = roomy.evictor.switch(memory("sink", 260))
    assert [type(record) for record in records] == [RestoredRows]
    assert same(contents(roomy), full)


def test_switching_everything_back_on_uses_the_keys_as_first_written() -> None:
    """Against a plain loop: every key is turned from where it was written to its present slot."""
    engine = talked(memory("entropy", 48))
    engine.evictor.switch(memory("sink", 120))
    rows = torch.arange(engine.resident)
    first = engine.cache.first_written(rows, engine.ledger.held_positions)
    for layer, rotation in enumerate(loaded("llama").rotations):
        assert rotation.key is not None
        key = first.tensors[2 * layer]
        for slot, old in enumerate(first.written_at.tolist()):
            cos, sin = rotation.key.cos_sin(torch.tensor([old]), torch.tensor([slot]))
            moved = rotation.key.apply(key[:, slot : slot + 1], cos, sin)
            torch.testing.assert_close(engine.cache.layer_keys(layer)[0, :, slot], moved[:, 0])


@pytest.mark.parametrize(
    ("first", "switches", "resident"),
    [
        pytest.param((64, 1), [(200, 1)], 64, id="over its limit"),
        pytest.param((200, 1), [(64, 1), (200, 1)], 64, id="what it let go of"),
        pytest.param((64, PLENTY), [(64, 0)], 64, id="off"),
        pytest.param((64, PLENTY), [(150, 0)], 150, id="off, as rows come back"),
        pytest.param(
            (200, PLENTY), [(64, PLENTY), (64, 0), (64, PLENTY), (200, PLENTY)], 64, id="on again"
        ),
    ],
)
def test_an_archive_that_is_full_or_off_has_nothing_to_bring_back(
    first: tuple[int, int], switches: list[tuple[int, int]], resident: int
) -> None:
    engine = talked(memory("sink", *first))
    is_kept = first[1] == PLENTY
    assert engine.ledger.archived_count == is_kept * (engine.ledger.seen - engine.resident)
    for budget, archive in switches:
        engine.evictor.switch(memory("sink", budget, archive))
        assert engine.store.archive.nbytes <= archive
    assert engine.resident == resident
    assert engine.ledger.archived_count == 0


@pytest.mark.parametrize("policy", ["sink", "random", "entropy"])
def test_archived_rows_can_be_pinned_up_to_the_allowance(policy: str) -> None:
    engine = talked(memory(policy, 128))
    away = np.setdiff1d(np.arange(4, engine.ledger.seen), engine.ledger.held_positions)[:63]
    engine.evictor.pin(away, True)
    assert np.isin(away, engine.ledger.held_positions).all()
    assert engine.resident == 128


def test_turns_undone_leave_nothing_in_the_archive() -> None:
    engine = talked(memory("sink", 64))
    before = engine.store.archive.nbytes
    for turn in range(30):
        checkpoint = engine.checkpoint()
        talk(engine, 7 + turn, count=100)
        engine.undo(checkpoint)
    assert engine.store.archive.nbytes <= 2 * before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*((one, torch.float32) for one in BOUNDED), ("entropy", torch.bfloat16)],
)
def test_turns_undone_one_by_one_and_said_again_leave_no_trace(
    policy: str, dtype: torch.dtype
) -> None:
    engine = Engine(loaded("llama", dtype), memory(policy))
    marks, before = [], []
    for turn in range(6):
        marks.append(engine.checkpoint())
        before.append(contents(engine) if turn else [])
        talk(engine, turn)
    end, logits = contents(engine), engine.logits
    for turn in range(5, 2, -1):
        engine.undo(marks[turn])
        assert same(contents(engine), before[turn])
    for turn in range(3, 6):
        talk(engine, turn)
    assert same(contents(engine), end)
    assert logits is not None
    assert engine.logits is not None
    assert torch.equal(engine.logits, logits)


def test_what_was_undone_does_not_come_back_on_a_switch() -> None:
    engine = talked(memory("sink", 64))
    checkpoint = engine.checkpoint()
    seen = engine.ledger.seen
    talk(engine, 7, count=90)
    engine.undo(checkpoint)
    engine.evictor.switch(memory("sink", 300))
    assert engine.ledger.held_positions.tolist() == list(range(seen))


def test_a_switch_tells_what_left_and_what_came() -> None:
    engine = talked(memory("sink", 64))
    before = set(engine.ledger.held_positions.tolist())
    records = engine.evictor.switch(replace(memory(), policy=policy_class("entropy")()))
    gone = {p for r in records if isinstance(r, EvictedRows) for p in r.positions.tolist()}
    came = {p for r in records if isinstance(r, RestoredRows) for p in r.positions.tolist()}
    assert (before - gone) | came == set(engine.ledger.held_positions.tolist())
    assert gone <= before
    assert not came & before
    assert came
    assert isinstance(engine.settings.policy, policy_class("entropy"))
    assert not isinstance(engine.settings.policy, Sink)
