"""Divides the cache's budget among sinks, pins, the eviction policy and recall, in tokens.

budget = sinks + pins + E + reserve. Sinks (the first tokens) and pins are never evicted, the policy
decides which tokens take the E places, and the reserve is for tokens that recall restores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sirchat.engine.types import CacheSettings
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger

_LEAST = 8  # tokens that sinks, pins and reserve leave to the policy
_USUAL_RESERVE, _OWN_ROWS = 400, 64


@dataclass(frozen=True)
class Division:
    """How the budget is divided at one moment; all numbers are tokens (cache slots)."""

    total: int  # the budget; the model's context length if the policy never evicts
    hard_bound: int  # most tokens at any time; above the budget only under `between-turns`
    sinks: int
    pins: int  # held ones, without pinned sinks
    most_pins: int | None  # that the user may pin; None: no limit
    full_reserve: int  # for recalled tokens, once not all tokens fit
    reserve: int  # of these, set aside now
    policy_rows: int  # tokens held now that recall has not restored
    policy_budget: int  # total - reserve
    policy_bound: int  # hard_bound - reserve
    evictable: int  # E, that the policy decides about
    protected: int  # most tokens of the current round that are protected from eviction
    chunk_size: int  # ids for which room is made at once while a turn is read
    eviction_block: int  # tokens evicted at once while a reply is generated


def divide_budget(
    settings: CacheSettings, ledger: Ledger, context_length: int, among: Positions | None = None
) -> Division:
    """Divide the budget; `among` are the positions whose pins count, by default those held."""
    policy, recall = settings.policy, settings.recall
    is_bounded = policy.bounded
    total = settings.budget if is_bounded else context_length
    is_exceeded = settings.evict == "between-turns" and is_bounded
    hard_bound = max(total, context_length) if is_exceeded else total
    sinks = settings.sinks if policy.honours_sinks else 0
    held_pins = pins = count_pins(settings, ledger, ledger.held_positions)
    if among is not None:
        pins = count_pins(settings, ledger, among)
    policy_rows = ledger.held_count - len(ledger.recalled)

    full_reserve = reserve = 0
    if recall is not None and is_bounded:
        if recall.n is not None:
            room = total - sinks - held_pins
            full_reserve = reserve = most_recalled(recall.n, room)
        else:  # leaves room for all pins, also for those that are not held now
            room = total - sinks - count_pins(settings, ledger, ledger.pinned_positions)
            full_reserve = most_recalled(usual_reserve(room), room)
            has_evicted = policy_rows < ledger.seen  # also if all evicted tokens are recalled
            if has_evicted and policy_rows <= total - full_reserve:
                reserve = full_reserve

    evictable = max(_LEAST, total - reserve - sinks - pins)
    protected = policy.newest_room(evictable) // 2
    limits_pins = is_bounded and policy.honours_pins
    return Division(
        total=total,
        hard_bound=hard_bound,
        sinks=sinks,
        pins=held_pins,
        most_pins=min(total // 2, total - sinks - _LEAST) if limits_pins else None,
        full_reserve=full_reserve,
        reserve=reserve,
        policy_rows=policy_rows,
        policy_budget=total - reserve,
        policy_bound=hard_bound - reserve,
        evictable=evictable,
        protected=protected,
        chunk_size=max(1, min(evictable // 4, protected)),
        eviction_block=min(max(8, (total - reserve) // 16), protected),
    )


def budget_for(
    tokens: int, settings: CacheSettings, ledger: Ledger, context_length: int
) -> int | None:
    """The smallest budget under which the policy decides about at least `tokens` tokens.

    Only powers of two and the context length are tried; None if even the latter is too small.
    """
    size = _LEAST
    while size < context_length:
        size = min(2 * size, context_length)
        division = divide_budget(replace(settings, budget=size), ledger, context_length)
        leaves_room = size - division.sinks - division.pins >= _LEAST
        if leaves_room and division.evictable >= tokens:
            return size
    return None


def is_pinned(settings: CacheSettings, ledger: Ledger, at: Positions) -> NDArray[np.bool_]:
    """Mask [n] of the pinned tokens at positions `at` [n]; all False if the policy ignores pins."""
    if not settings.policy.honours_pins:
        return np.zeros(len(at), bool)
    return (ledger.column("flags")[at] & np.uint8(Flag.PINNED)).astype(bool)


def count_pins(settings: CacheSettings, ledger: Ledger, at: Positions) -> int:
    """How many of the tokens at positions `at` are pinned, not counting sinks."""
    sinks = settings.sinks if settings.policy.honours_sinks else 0
    return int((is_pinned(settings, ledger, at) & (at >= sinks)).sum())


def usual_reserve(room: int) -> int:
    """Tokens reserved under `recall_n: auto`, of the `room` beside sinks and pins."""
    # Measured with SmolLM2 and facts in 4,000 tokens of real talk, when recall filled the whole
    # reserve: at any budget a larger reserve found more facts, up to 400 rows or three quarters of
    # the room. But where only 25 rows were left to the policy, text was harder to predict, by 0.06
    # nats a token.
    return max(room // 4, min(3 * room // 4, room - _OWN_ROWS, _USUAL_RESERVE))


def most_recalled(n: int, room: int) -> int:
    """How many of `n` wanted tokens recall gets: at most three quarters of the `room`."""
    return max(0, min(n, 3 * room // 4, room - _LEAST))
