"""What the policy keeps of some tokens, within the KV cache's budget: sinks + pins + E.

Sinks (the first tokens of the stream) and pins are never evicted. The eviction policy chooses the
tokens in the other E places. Recalled tokens take some of those places until the round ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sirchat.engine.types import CacheSettings
from sirchat.errors import SettingError
from sirchat.memory.held_rows import HeldRows, Role
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag

MIN_EVICTABLE = 8  # tokens that sinks, pins and recall leave to the policy


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


class PolicyChoice:
    """Chooses by the policy in `settings`, and moves no token.

    `round` is the current round, whose newest tokens are protected from eviction.
    """

    def __init__(self, settings: CacheSettings, context_length: int, store: KeyValueStore) -> None:
        self.settings, self._context_length = settings, context_length
        self.store, self.ledger = store, store.ledger
        self.round = 0

    def divide_budget(
        self, holdable: Positions | None = None, budget: int | None = None
    ) -> Division:
        """Divide the budget among the tokens at positions `holdable`, by default the held ones."""
        settings, policy = self.settings, self.settings.policy
        is_bounded = policy.bounded
        total = (budget or settings.budget) if is_bounded else self._context_length
        may_exceed = settings.evict == "between-turns" and is_bounded
        sinks = settings.honoured_sinks
        held_pins = pins = self._count_pins(self.ledger.held_positions)
        if holdable is not None:
            pins = self._count_pins(holdable)
        evictable = max(MIN_EVICTABLE, total - sinks - pins)
        protected = policy.newest_room(evictable) // 2
        limits_pins = is_bounded and policy.honours_pins
        return Division(
            total=total,
            hard_bound=max(total, self._context_length) if may_exceed else total,
            sinks=sinks,
            pins=held_pins,
            max_pins=min(total // 2, total - sinks - MIN_EVICTABLE) if limits_pins else None,
            evictable=evictable,
            protected=protected,
            chunk_size=max(1, min(evictable // 4, protected)),
            eviction_block=min(max(8, total // 16), protected),
        )

    def smallest_budget_for(self, tokens: int) -> int | None:
        """The smallest budget with at least `tokens` places for the policy (E), if one suffices.

        Candidates are the powers of two below the context length, and the context length.
        """
        size = MIN_EVICTABLE
        while size < self._context_length:
            size = min(2 * size, self._context_length)
            division = self.divide_budget(budget=size)
            leaves_room = size - division.sinks - division.pins >= MIN_EVICTABLE
            if leaves_room and division.evictable >= tokens:
                return size
        return None

    def free_budget(self, incoming: int = 0) -> int:
        """The budget without sinks, pins and a turn of `incoming` ids, in tokens."""
        division = self.divide_budget()
        return min(division.total, division.hard_bound - incoming) - division.sinks - division.pins

    def check_pins(self, new_pins: int, positions: Positions | None = None) -> None:
        """Raise SettingError if `new_pins` more pins would leave too little room.

        Existing pins are counted at `positions`, by default all held and archived tokens.
        """
        division = self.divide_budget()
        if division.max_pins is None:
            return
        positions = self.reachable() if positions is None else positions
        pins = self._count_pins(positions)
        pins += new_pins - min(new_pins, max(0, division.sinks - self.ledger.seen))
        if pins > division.max_pins:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {division.total} allows only "
                f"{division.max_pins}",
                hint=f"raise the budget, {self._unpinning_hint(positions)}",
            )

    def pinned(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n] of the pinned tokens at `positions` [n]; none if the policy ignores pins."""
        if not self.settings.policy.honours_pins:
            return np.zeros(len(positions), bool)
        return (self.ledger.column("flags")[positions] & np.uint8(Flag.PINNED)).astype(bool)

    def sinks_and_pins(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n] of the tokens at `positions` [n] that are never evicted."""
        return (positions < self.settings.honoured_sinks) | self.pinned(positions)

    def reachable(self) -> Positions:
        """Stream positions of all tokens that can be held, with those set aside for recall."""
        reachable, aside = self.store.reachable(), self.store.placement.aside
        if len(left_out := self.ledger.left_out):
            reachable = np.setdiff1d(reachable, left_out, assume_unique=True)
        return np.union1d(reachable, aside) if len(aside) else reachable

    def view(self, positions: Positions, round: int | None = None) -> HeldRows:
        """The tokens at stream `positions` [n], held or archived, as the policy's input.

        Sinks, pins and, if `round` is given, its newest tokens are protected from eviction.
        """
        settings, division, ledger = self.settings, self.divide_budget(positions), self.ledger
        protected = self.sinks_and_pins(positions)
        if settings.protect and round is not None:
            is_current = ledger.column("round")[positions] == round
            protected |= is_current & (positions >= ledger.seen - division.protected)
        rows = ledger.view(positions, sinks=division.sinks, protected=protected)
        columns = dict[Any, Any]()
        if settings.policy.key_value_stats and len(positions):
            columns |= self.store.statistics(positions, settings.policy.key_value_stats)
        if settings.policy.needs == "keys" and len(positions):
            columns["keys"], columns["values"] = self.store.as_read(positions)
        return replace(rows, **columns) if columns else rows

    def keep(self, rows: HeldRows, count: int) -> Positions:
        """Stream positions of the `count` of `rows` that the policy keeps.

        Raises SettingError if its choice is invalid, or whatever the policy raises.
        """
        positions = rows.position.numpy().copy()  # a policy may change what it is given
        chosen = self.settings.policy.keep(rows, count)
        is_valid = len(chosen) == count and bool((chosen.diff() > 0).all())
        if count and is_valid:
            is_valid = int(chosen[0]) >= 0 and int(chosen[-1]) < len(rows)
        if not is_valid or int(rows.protected[chosen].sum()) < int(rows.protected.sum()):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} made an invalid choice of tokens",
                hint="`sirchat policies check` shows why; /policy NAME chooses another policy",
            )
        kept: Positions = positions[chosen.numpy()]
        return kept

    def keep_at_most(self, positions: Positions, most: int) -> Positions:
        """The tokens at these positions; if more than `most`, those that the policy keeps."""
        if len(positions) <= most:
            return positions
        return self.keep(self.view(positions, self.round), most)

    def keep_required(
        self, positions: Positions, is_required: NDArray[np.bool_], most: int
    ) -> Positions:
        """The required tokens at `positions` [n], and others up to `most` in all."""
        count = max(most, int(is_required.sum()))
        if count >= len(positions):
            return positions
        rows = replace(self.view(positions), protected=torch.from_numpy(is_required))
        return self.keep(rows, count)

    def reduce(self, positions: Positions) -> Positions:
        """Those of the tokens at `positions` that stay right after an anchor, although all fit."""
        policy = self.settings.policy
        rows = policy.reduce(self.view(positions)) if policy.compacts_at_anchors else None
        return positions if rows is None else positions[rows.numpy()]

    def _count_pins(self, positions: Positions) -> int:
        """The number of pinned tokens at `positions`, not counting sinks."""
        return int((self.pinned(positions) & (positions >= self.settings.honoured_sinks)).sum())

    def _unpinning_hint(self, positions: Positions) -> str:
        """How the user can unpin most: the turn with most pins, if that is no system prompt."""
        pinned = positions[self.pinned(positions)]
        roles = self.ledger.column("role")[pinned]
        of_turn = self.ledger.column("turn")[pinned[roles != Role.SYSTEM]]
        if not len(of_turn) or 2 * len(of_turn) < len(pinned):
            return "unpin something, turn off tools, or set pin_system false"
        turn = int(np.bincount(of_turn).argmax())
        return f"or unpin something: /unpin turn {turn} lets go of {(of_turn == turn).sum()}"
