"""Divides the budget of the KV cache, in tokens: budget = sinks + pins + E.

Sinks (the first tokens of the stream) and pins are never evicted. The eviction policy chooses the
tokens in the other E places. Recalled tokens take some of those places until the round ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sirchat.engine.types import CacheSettings
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger

_MIN_EVICTABLE = 8  # tokens that sinks, pins and recall leave to the policy
# Under `recall_n: auto`: most tokens restored, and tokens left to the policy beside these.
_MAX_AUTO_RECALLED, _AUTO_UNRECALLED = 400, 64


@dataclass(frozen=True)
class Division:
    """How the budget is divided at one moment. All numbers are tokens (cache slots)."""

    total: int  # the budget; the model's context length if the policy never evicts
    hard_bound: int  # most tokens at any time; above the budget only under `between-turns`
    sinks: int
    pins: int  # pinned tokens that are held, without sinks
    max_pins: int | None  # most tokens that may be pinned; None: no limit
    evictable: int  # E, that the policy decides about
    protected: int  # most tokens of the current round that are protected from eviction
    chunk_size: int  # ids for which room is made at once while a turn is read
    eviction_block: int  # tokens evicted at once while a reply is generated


def divide_budget(
    settings: CacheSettings, ledger: Ledger, context_length: int, holdable: Positions | None = None
) -> Division:
    """Divide the budget among the tokens at positions `holdable`, by default the held ones."""
    policy = settings.policy
    is_bounded = policy.bounded
    total = settings.budget if is_bounded else context_length
    may_exceed = settings.evict == "between-turns" and is_bounded
    sinks = settings.sinks if policy.honours_sinks else 0
    held_pins = pins = count_pins(settings, ledger, ledger.held_positions)
    if holdable is not None:
        pins = count_pins(settings, ledger, holdable)
    evictable = max(_MIN_EVICTABLE, total - sinks - pins)
    protected = policy.newest_room(evictable) // 2
    limits_pins = is_bounded and policy.honours_pins
    return Division(
        total=total,
        hard_bound=max(total, context_length) if may_exceed else total,
        sinks=sinks,
        pins=held_pins,
        max_pins=min(total // 2, total - sinks - _MIN_EVICTABLE) if limits_pins else None,
        evictable=evictable,
        protected=protected,
        chunk_size=max(1, min(evictable // 4, protected)),
        eviction_block=min(max(8, total // 16), protected),
    )


def smallest_budget_for(
    tokens: int, settings: CacheSettings, ledger: Ledger, context_length: int
) -> int | None:
    """The smallest budget with at least `tokens` places for the policy (E); None if none suffices.

    Candidates are the powers of two below the context length, and the context length.
    """
    size = _MIN_EVICTABLE
    while size < context_length:
        size = min(2 * size, context_length)
        division = divide_budget(replace(settings, budget=size), ledger, context_length)
        leaves_room = size - division.sinks - division.pins >= _MIN_EVICTABLE
        if leaves_room and division.evictable >= tokens:
            return size
    return None


def pinned_mask(settings: CacheSettings, ledger: Ledger, positions: Positions) -> NDArray[np.bool_]:
    """Mask [n] of the pinned tokens at `positions` [n]; all False if the policy ignores pins."""
    if not settings.policy.honours_pins:
        return np.zeros(len(positions), bool)
    return (ledger.column("flags")[positions] & np.uint8(Flag.PINNED)).astype(bool)


def count_pins(settings: CacheSettings, ledger: Ledger, positions: Positions) -> int:
    """The number of pinned tokens at `positions`, not counting sinks."""
    sinks = settings.sinks if settings.policy.honours_sinks else 0
    return int((pinned_mask(settings, ledger, positions) & (positions >= sinks)).sum())


def recall_limit(wanted: int | None, room: int) -> int:
    """The most tokens that recall may restore: `wanted`, or fewer if they do not fit.

    `wanted` is None under `recall_n: auto`. `room` is the budget without sinks and pins.
    """
    # Measured with SmolLM2 and facts in 4,000 tokens of real talk, when recall filled all that it
    # might: at any budget more room found more facts, up to 400 rows or three quarters of it. But
    # where only 25 rows were left to the policy, text was harder to predict, by 0.06 nats a token.
    if wanted is None:
        wanted = max(room // 4, min(room - _AUTO_UNRECALLED, _MAX_AUTO_RECALLED))
        wanted = min(wanted, 3 * room // 4)
    return max(0, min(wanted, room - _MIN_EVICTABLE))
