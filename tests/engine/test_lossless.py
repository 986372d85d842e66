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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "family", "dtype"),
    [
        *((one, "llama", torch.float32) for one in BOUNDED),
        ("entropy", "llama", torch.bfloat16),
        *(("h2o", family, torch.float32) for family in ("deepseek-mla", "gemma2")),
    ],
)
def test_switches_and_undone_turns_leave_no_trace(
    policy: str, family: str, dtype: torch.dtype
) -> None:
    """Switched over all other policies, with less and more room; undone and said again."""
    engine = Engine(loaded(family, dtype), memory(policy))
    marks, before = [], []
    for turn in range(6):
        marks.append(engine.checkpoint())
        before.append(contents(engine) if turn else [])
        talk(engine, turn)
    end, logits = contents(engine), engine.logits
    for number, other in enumerate(BOUNDED):
        engine.switcher.switch(memory(other, (24, 64, 200)[number % 3]))
    engine.switcher.switch(memory(policy))
    assert same(contents(engine), end)
    for turn in range(5, 2, -1):
        engine.undo(marks[turn])
        assert same(contents(engine), before[turn])
    for turn in range(3, 6):
        talk(engine, turn)
    assert same(contents(engine), end)
    assert logits is not None
    assert engine.logits is not None
    assert torch.equal(engine.logits, logits)
