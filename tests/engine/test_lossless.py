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
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.memory.ledger import MovedRows, Role
from sirchat.memory.policies import policy_class, policy_names

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
    """Over all other policies, with less and with more room, and with room for everything."""
    engine = talked(memory(one), family, rounds=4)
    before = contents(engine)
    for number, other in enumerate(BOUNDED):
        engine.switcher.switch(memory(other, (24, 64, 200)[number % 3]))
    engine.switcher.switch(memory(one))
    assert same(contents(engine), before)


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_a_larger_budget_holds_what_it_would_choose_from_everything(policy: str) -> None:
    engine = talked(memory(policy, 64))
    seen = engine.ledger.seen
    records = engine.switcher.switch(memory(policy, 150))
    at = np.arange(seen)
    sinks = engine.settings.sinks if engine.settings.policy.honours_sinks else 0
    newest = at >= seen - (150 - sinks) // 2
    protected = (at < sinks) | (newest & (engine.ledger.column("round") == 5))
    view = engine.ledger.view(at, sinks=sinks, protected=protected)
    stats: dict[Any, Any] = engine.store.statistics(at, engine.settings.policy.key_value_stats)
    view = replace(view, **stats)
    assert engine.ledger.held_positions.tolist() == engine.settings.policy.keep(view, 150).tolist()
    assert sum(len(r.positions) for r in records if isinstance(r, MovedRows) and r.restored) >= 86


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
        engine.switcher.switch(memory("sink", budget, archive))
        assert engine.store.archive.nbytes <= archive
    assert engine.resident == resident
    assert engine.ledger.archived_count == 0


@pytest.mark.parametrize("policy", ["sink", "random", "entropy"])
def test_archived_rows_can_be_pinned_up_to_the_allowance(policy: str) -> None:
    engine = talked(memory(policy, 128))
    away = np.setdiff1d(np.arange(4, engine.ledger.seen), engine.ledger.held_positions)[:63]
    engine.switcher.pin(away, True)
    assert np.isin(away, engine.ledger.held_positions).all()
    assert engine.resident == 128


def test_turns_undone_leave_nothing_in_the_archive() -> None:
    engine = talked(memory("sink", 64))
    before = engine.store.archive.nbytes
    for turn in range(8):
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
