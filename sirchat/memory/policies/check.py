"""Checks that an eviction policy keeps its contract (`sirchat policies check NAME`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.memory.ledger import Flag, HeldRows, Ledger, Placement, Role, State
from sirchat.memory.policies.base import Policy, ScorePolicy

_CASES = 50


def contract_violations(policy: Policy) -> list[str]:
    """Test a policy on random ledgers; returns one line for each violation of its contract."""
    if not policy.bounded:
        return []
    violations: dict[str, None] = {}
    for case in range(_CASES):
        held, num_keep = _random_rows(case, policy)
        before = held.position.clone()
        try:
            kept = policy.keep(held, num_keep)
            again = policy.keep(held, num_keep)
            numbers = _scores_and_factors(policy, held)
        except Exception as error:  # any error in another package's policy breaks the contract
            return [f"the policy raised {type(error).__name__}: {error}"]
        promises = {
            "keep() must return int64 row numbers": kept.dtype == torch.int64,
            "keep() must return exactly num_keep rows": len(kept) == num_keep,
            "rows must be sorted and unique": bool((kept.diff() > 0).all()),
            "keep() must return numbers of held rows": bool(
                ((kept >= 0) & (kept < len(held))).all()
            ),
            "keep() must return the same rows for the same arguments": torch.equal(kept, again),
            "keep() must not change the rows": torch.equal(before, held.position),
            "score() and log_factors() must return tensors with one number for each row": all(
                isinstance(one, torch.Tensor) and one.shape == (len(held),) for one in numbers
            ),
        }
        if promises["keep() must return numbers of held rows"]:
            stays = torch.zeros(len(held), dtype=torch.bool)
            stays[kept] = True
            promises["protected rows must stay"] = bool(stays[held.protected].all())
        violations |= {text: None for text, kept_promise in promises.items() if not kept_promise}
    return list(violations)


def _scores_and_factors(policy: Policy, rows: HeldRows) -> list[Tensor]:
    if not isinstance(policy, ScorePolicy):
        return []
    return [policy.score(rows), *policy.log_factors(rows).values()]


def _random_rows(case: int, policy: Policy) -> tuple[HeldRows, int]:
    """Random rows, from the seed `case`, and a random number of rows to keep."""
    random = np.random.default_rng(case)
    ledger = Ledger(seed=case, unknown_surprisal=1.0)
    for round_number in range(int(random.integers(1, 6))):
        count = int(random.integers(2, 40))
        flags = (random.random(count) < 0.1) * int(Flag.ANCHOR)
        flags += (random.random(count) < 0.05) * int(Flag.PINNED)
        ledger.append(
            random.integers(0, 50, count).tolist(),
            random.exponential(2.0, count).round(1).tolist(),
            turn=round_number,
            round=round_number,
            roles=[int(Role.USER)] * count,
            flags=flags.tolist(),
        )
        ledger.apply_decay(0.9)
        at, stays = ledger.held_positions.copy(), random.random(ledger.held_count) < 0.8
        ledger.hold(Placement(at[stays]), at[~stays], at[:0], State.NOT_STORED)
    sinks = 4 if policy.honours_sinks else 0
    at = ledger.held_positions
    protected = (at < sinks) | (at >= ledger.seen - 3)
    if policy.honours_pins:
        protected |= (ledger.column("flags")[at] & Flag.PINNED).astype(bool)
    held = ledger.view(at, sinks=sinks, protected=protected)
    stats: dict[str, Any] = {
        name: torch.from_numpy(random.random(len(held))) for name in policy.key_value_stats
    }
    if policy.attention_stats and policy.attention_stats.per_head:  # of two layers
        stats["head_attention"] = torch.from_numpy(random.random((2, 3, len(held))))
    if policy.needs == "keys":
        for name in ("keys", "values"):  # of two layers
            layers = random.normal(size=(2, 3, len(held), 8)).astype(np.float32)
            stats[name] = tuple(torch.from_numpy(layers))
    held = replace(held, **stats)
    return held, int(random.integers(protected.sum(), len(at) + 1))
