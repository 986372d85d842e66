"""Switches settings and pins in the middle of a conversation; switching back is exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sirchat.engine.eviction import Evictor, PolicyChoice
from sirchat.engine.types import CacheSettings
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import MovedRows, Placement


@dataclass(frozen=True)
class _BeforeSwitch:
    """The state after the last forward pass, before the settings were switched."""

    settings: CacheSettings
    placement: Placement
    seen: int  # tokens read by then
    # Where the last switch put the tokens: as long as they are there, switching back is exact.
    placement_since: Placement


class Switcher:
    """Puts new settings and pins into effect; with new settings the policy chooses anew."""

    def __init__(self, choice: PolicyChoice, evictor: Evictor) -> None:
        self._choice, self._evictor = choice, evictor
        self._store, self._ledger, self._cache = choice.store, choice.ledger, choice.store.cache
        self._before_switch: _BeforeSwitch | None = None

    def switch(self, settings: CacheSettings, pins: int = 0) -> list[MovedRows]:
        """Change the settings; the new policy chooses among all held and archived tokens.

        Switching back before the next forward pass restores exactly the old cache. `pins` tokens
        will be pinned next. Raises SettingError, changing nothing, if sinks and pins leave too
        little room.
        """
        old, self._choice.settings = self._choice.settings, settings
        present, seen = self._store.placement, self._ledger.seen
        before = self._before_switch
        if before and not (before.seen == seen and self._store.is_placed(before.placement_since)):
            before = None
        try:
            self._choice.check_pins(pins)
            names = "policy", "budget", "sinks"
            is_same = all(getattr(old, name) == getattr(settings, name) for name in names)
            if before and before.settings == settings and self._can_stay(before.placement):
                placement = before.placement
            elif is_same and self._can_stay(present):
                placement = present
            else:
                placement = self._choose()
        except BaseException:  # whatever the new policy raises; or a signal
            self._choice.settings = old
            raise
        before = before or _BeforeSwitch(old, present, seen, placement)
        self._before_switch = replace(before, placement_since=placement)
        if settings.policy.bounded:
            self._cache.grow_to(settings.budget)
        moves = self._store.place(placement)
        self._cache.set_positions(absolute_positions=settings.absolute_positions)
        if (settings.archive, settings.folder) != (old.archive, old.folder):
            moves += self._evictor.end_recall()  # what is aside is in the old archive
            self._store.set_limit(settings.archive, settings.folder)
        if settings.policy.bounded:
            self._cache.shrink_to(settings.budget)
        return moves

    def pin(self, positions: Positions, pinned: bool) -> list[MovedRows]:
        """Pin or unpin the tokens at these positions; then the policy chooses among all tokens.

        Raises SettingError, changing nothing, if the pins would leave too little room.
        """
        before = self._ledger.pinned_positions
        if pinned:
            self.check_new_pins(positions)
            self._evictor.reread(positions)
        self._ledger.pin(positions, pinned)
        try:
            return self._store.place(self._choose())
        except BaseException:  # whatever a policy raises; or a signal
            self._ledger.pin_only(before)
            raise

    def pin_held(self, positions: Positions, pins_released: int = 0) -> int:
        """Pin those tokens at `positions` that are held, and move none; returns their number.

        Raises SettingError, changing nothing, if the pins would leave too little room even after
        `pins_released` others are unpinned.
        """
        held = np.intersect1d(positions, self._store.placement.held_without_recalled)
        self.check_new_pins(held, pins_released)
        self._ledger.pin(held, True)
        self._store.place(self._store.placement)  # a new one: no switch leads back behind the pins
        return len(held)

    def unpin_held(self, positions: Positions) -> None:
        self._ledger.pin(positions, False)
        self._store.place(self._store.placement)

    def choose_unless_valid(self) -> list[MovedRows]:
        """Let the policy choose again where what is held, after an undo, can't stay so."""
        if self._can_stay(self._store.placement):
            return []
        return self._store.place(self._choose())

    def check_new_pins(self, positions: Positions, pins_released: int = 0) -> None:
        """Raise SettingError if pins at `positions` would leave too little room, as `pin_held`."""
        is_new = ~np.isin(positions, self._ledger.pinned_positions)
        is_new &= positions >= self._choice.settings.honoured_sinks
        self._choice.check_pins(int(is_new.sum()) - pins_released)

    def _can_stay(self, placement: Placement) -> bool:
        """Whether all of a placement is stored and fits, and all pins that can be held are held."""
        reachable = self._choice.reachable()
        pinned = reachable[self._choice.pinned(reachable)]
        return (
            len(placement.held) <= self._choice.divide_budget().hard_bound
            and self._store.has(np.union1d(placement.held, placement.aside))
            # not only as recalled tokens
            and bool(np.isin(pinned, placement.held_without_recalled).all())
        )

    def _choose(self) -> Placement:
        """The policy's choice among all held and archived tokens; none counts as recalled."""
        choice, policy = self._choice, self._choice.settings.policy
        reachable, most = choice.reduce(choice.reachable()), choice.divide_budget().total
        if policy.bounded or len(reachable) <= most:
            return Placement(choice.keep_at_most(reachable, most))
        # Not all fit, and nothing may be evicted: continue with those that are held.
        if self._cache.length > most:
            choice.keep(choice.view(self._store.placement.held_without_recalled), most)  # raises
        return Placement(self._ledger.held_positions.copy())
