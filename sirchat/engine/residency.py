"""Decides which tokens the KV cache holds, one row for each token.

Tokens are evicted or restored when room is needed, when settings or pins change, by undo and by
recall. Almost every method that evicts or restores rows returns records of these rows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.budget import Budget
from sirchat.engine.types import (
    CacheSettings,
    EvictedRows,
    RestoredRows,
    Selection,
    TurnRef,
)
from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_value_store import CacheCheckpoint, KeyValueStore
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, HeldRows

CacheUpdate = list[EvictedRows | RestoredRows]

_NONE = np.zeros(0, np.int64)


class Residency:
    """Decides which tokens of one conversation the KV cache holds, one row for each token.

    The eviction policy of the settings makes the choice.

    Attributes:
        budget: the settings in force, and how many rows they allow.
        round: number of the current round (user turn and reply). Its newest rows are protected
            from eviction.
    """

    def __init__(self, budget: Budget, cache: BoundedCache, store: KeyValueStore) -> None:
        self.budget, self.round = budget, 0
        self._ledger, self._cache, self._store = budget.ledger, cache, store
        self._layers: tuple[Positions, ...] = ()  # recalled rows of single layers, layer by layer
        self._at_last_pass: tuple[CacheSettings, Selection] | None = None

    @property
    def count(self) -> int:
        """Number of rows in the cache, including those that recall has restored."""
        return self._cache.length

    @property
    def recalled(self) -> int:
        """Number of rows in the cache that recall has restored for this round."""
        return self.count - self.budget.policy_rows

    @property
    def recalled_positions(self) -> Positions:
        """Stream positions, ascending, of the tokens that recall has restored in any layer."""
        return np.unique(np.concatenate([self._ledger.recalled, *self._layers]))

    @property
    def selection(self) -> Selection:
        """The record of the rows that the cache holds now."""
        ledger = self._ledger
        return Selection(ledger.held_positions.copy(), ledger.recalled, self._layers)

    def view(self, round: int | None) -> HeldRows:
        """The table of the tokens in the cache, as the policy sees it.

        Tokens that recall has restored are left out. Sinks and pins are marked as protected from
        eviction. If `round` is a number and the setting `protect` is on, the newest tokens of the
        round with this number are marked, too.
        """
        return self.view_of(self.budget.policy_positions, round)

    def view_of(self, at: Positions, round: int | None = None) -> HeldRows:
        """The table of the tokens at stream positions `at` [n], ascending, as the policy sees it.

        The tokens may be in the cache or in the archive. The table includes the statistics of keys
        and values that the policy uses. It marks the rows that are protected from eviction, like
        the table of `view`.
        """
        rows, wanted = self.budget.view(at, round), self.budget.settings.policy.key_value_stats
        if not (wanted and len(at)):
            return rows
        stats = self._store.statistics(at, wanted)
        columns: dict[str, Any] = {name: torch.from_numpy(one) for name, one in stats.items()}
        return replace(rows, **columns)

    def note_pass(self) -> None:
        """Record that a forward pass comes next.

        If `switch` later returns to the settings of this pass, the cache gets the rows that it held
        after this pass.
        """
        self._at_last_pass = None

    def make_room(self, count: int) -> list[EvictedRows]:
        """Evict rows, if necessary, so that `count` more rows fit in the cache.

        The policy chooses the rows to evict. If the last token read is an anchor (the end of a
        sentence or round), the policy's method `reduce` first chooses the rows that stay. Returns
        one record for each eviction.
        """
        budget, evicted = self.budget, list[EvictedRows]()
        flags = self._ledger.column("flags")
        if budget.compacts_at_anchors and len(flags) and flags[-1] & Flag.ANCHOR:
            rows = budget.settings.policy.reduce(self.view(None))
            if rows is not None:
                evicted.append(self._keep_rows(rows))
        if self.recalled > budget.reserve:  # new pins have taken some of the reserve
            self.clear_reserve()
        if budget.policy_rows + count > budget.policy_bound:
            evicted.append(self._keep(budget.policy_bound - count))
        return evicted

    def make_room_for_turn(self, count: int, max_new_tokens: int, at: TurnRef) -> list[EvictedRows]:
        """Evict rows before the user turn `at`, which has `count` ids; returns records of them.

        First, if the turn and all tokens read so far do not fit in the budget, rows are evicted
        until the reserve for recalled tokens is free. The next step depends on the setting `evict`.
        With "when-full", no more rows are evicted. With "before-turn", rows are evicted until the
        turn and a reply of `max_new_tokens` fit in the budget. With "between-turns", only the rows
        above the budget are evicted, and the cache is enlarged for the turn and the reply.
        """
        self.round = at.round
        budget, to_come = self.budget, count + max_new_tokens
        evicted = list[EvictedRows]()
        without_reserve = budget.total - budget.full_reserve
        if self._ledger.seen + count > budget.total and budget.policy_rows > without_reserve:
            evicted.append(self._keep(without_reserve))
        if budget.settings.evict == "when-full" or budget.unbounded:
            return evicted
        wanted = budget.policy_budget - (0 if budget.only_between_turns else to_come)
        if budget.policy_rows > wanted:
            num_keep = max(wanted, int(self.view(self.round).protected.sum()))
            if num_keep < budget.policy_rows:
                evicted.append(self._keep(num_keep))
        if budget.only_between_turns:
            self._cache.grow_to(min(budget.hard_bound, self.count + to_come))
        return evicted

    def next_evicted(self, *, in_round: bool) -> Positions:
        """Stream positions [k], ascending, of the tokens that will be evicted next.

        The result is the next block of tokens that are evicted at once. If `in_round` is true, the
        newest tokens of the current round are protected from eviction; if it is false, they can be
        evicted, as in the next round. The result is empty while the cache has room for two more
        blocks, or if nothing may be evicted. If tokens are evicted only between turns, the result
        is the tokens that will be evicted before the next turn.
        """
        held, budget = self.view(self.round if in_round else None), self.budget
        block = budget.eviction_block
        has_room = budget.policy_rows + 2 * block <= budget.policy_budget
        if budget.only_between_turns:
            held, block = self.view(None), max(0, budget.policy_rows - budget.policy_budget)
        count = min(block, int((~held.protected).sum()))
        if budget.unbounded or not count or has_room:
            return _NONE
        rows = budget.settings.policy.keep(held, len(held) - count)
        leaves = np.ones(len(held), bool)
        leaves[rows.numpy()] = False
        return budget.policy_positions[leaves]

    def switch(self, settings: CacheSettings, pins: int = 0) -> CacheUpdate:
        """Change the settings; then fill the cache with the rows that the new policy chooses.

        The policy chooses from all rows in the cache or the archive. But if `settings` are again
        those of the last forward pass, the cache gets exactly the rows that it held after it.
        `pins` is the number of rows that the caller will pin next. Returns records of the evicted
        and of the restored rows. Raises SettingError, changing nothing, if sinks and pins leave too
        little room.
        """
        before, self.budget = self.budget, replace(self.budget, settings=settings)
        try:
            self.check_pins(pins)
            wanted = self._after_switch(before.settings)
        except Exception:  # whatever the new policy raises
            self.budget = before
            raise
        self._at_last_pass = self._at_last_pass or (before.settings, self.selection)
        if not self.budget.unbounded:
            self._cache.grow_to(self.budget.total)
        moves = self._hold(wanted)
        self._cache.set_positions(absolute_positions=settings.absolute_positions)
        old = before.settings
        if (settings.archive, settings.folder) != (old.archive, old.folder):
            self._store.set_limit(settings.archive, settings.folder)
        return moves

    def pin(self, positions: Positions, pinned: bool) -> CacheUpdate:
        """Pin the tokens at these stream positions, or unpin them if `pinned` is false.

        Then the policy chooses again from all rows in the cache or the archive. Returns records of
        the evicted and of the restored rows. Raises SettingError, changing nothing, if the pins
        would leave too little room.
        """
        before = self._ledger.pinned_positions
        if pinned:
            new = ~np.isin(positions, before) & (positions >= self.budget.sinks)
            self.check_pins(int(new.sum()))
        self._ledger.pin(positions, pinned)
        try:
            chosen = self._choice()
        except Exception:  # whatever a policy raises
            self._ledger.pin_only(before)
            raise
        self._at_last_pass = None
        return self._hold(chosen)

    def exclude(self, positions: Positions, excluded: bool = True) -> CacheUpdate:
        """Evict the tokens at these stream positions, except sinks, and never restore them.

        If `excluded` is False, nothing is evicted, and the tokens may be restored again. Returns
        records of the evicted rows.
        """
        positions = positions[positions >= self.budget.sinks]
        self._ledger.flag(Flag.EXCLUDED, positions, excluded)
        self._at_last_pass = None
        if not excluded:
            return []
        held, recalled = (
            np.setdiff1d(one, positions, assume_unique=True)
            for one in (self._ledger.held_positions, self._ledger.recalled)
        )
        return self._hold(Selection(held, recalled, self._layers))

    def check_pins(self, more: int) -> None:
        """Raise SettingError if the pinned tokens would leave too few cache rows to the policy.

        Counted are the tokens that are pinned now, and `more` tokens that are to be pinned.
        """
        if not self.budget.unbounded:
            self.budget.check_pins(self._store.reachable(), more)

    def require(self, count: int) -> None:
        """Raise ContextFullError if `count` more rows do not fit and the policy never evicts."""
        if self.budget.unbounded and self.count + count > self.budget.total:
            # The policy `full` raises the error itself, in its own words.
            self.budget.settings.policy.keep(self.view(None), self.budget.total - count)

    def undo(
        self, to: CacheCheckpoint, selection: Selection, round: int, *, keep_pins: bool
    ) -> CacheUpdate:
        """Go back to the checkpoint `to`; `round` becomes the number of the current round.

        The cache gets the rows of the checkpoint, including the rows that recall had restored
        (those of `selection`). If these rows do not fit the present settings, the policy chooses
        from all rows in the cache or the archive. The pins of the checkpoint are restored; with
        `keep_pins`, the present pins stay pinned and in the cache, too. Returns records of the rows
        evicted or restored because of present settings or pins. Raises LookupError, changing
        nothing, if a row of the checkpoint is neither in the cache nor in the archive.
        """
        self._cache.grow_to(len(to.held))
        self._store.undo(to)
        self.round, self._layers = round, ()
        self._ledger.recall(selection.recalled)
        with suppress(LookupError):  # the archive may have dropped the rows of single layers
            self._insert(selection.layers)
        self._at_last_pass = None
        budget = self.budget
        if not keep_pins:
            self._ledger.pin_only(to.pinned)
        added = np.setdiff1d(self._ledger.pinned_positions, to.pinned, assume_unique=True)
        is_full = self.recalled > budget.reserve or budget.policy_rows > budget.policy_bound
        if is_full or not np.isin(added, to.held).all():
            return self._hold(self._choice())
        return []

    def fill_reserve(self, chosen: Positions, layers: tuple[Positions, ...] = ()) -> CacheUpdate:
        """Restore archived tokens for the next turn, instead of those restored for the last one.

        All layers get the tokens at the ascending stream positions `chosen`, and layer i those at
        `layers[i]`, too. Returns records of the evicted and of the restored rows.
        """
        held = np.union1d(self.budget.policy_positions, chosen)
        own = layers if layers and len(layers[0]) else ()
        return self._hold(Selection(held, chosen, own))

    def clear_reserve(self) -> CacheUpdate:
        """Evict all rows that recall has restored; returns a record of them."""
        if not self.recalled:
            return []
        return self._hold(Selection(self.budget.policy_positions, _NONE))

    def erase(self, positions: Positions) -> None:
        """Delete the tokens at these stream positions from the cache, the archive and the ledger.

        The ledger keeps an empty row for each of these tokens.
        """
        self._store.erase(positions)
        self._layers = ()
        self._ledger.erase(positions)
        self._at_last_pass = None

    def _after_switch(self, before: CacheSettings) -> Selection:
        """Find which rows the cache must hold, after the settings have changed from `before`."""
        budget, last = self.budget, self._at_last_pass
        now = budget.settings
        if last is not None and last[0] == now and self._store.has(last[1].held):
            return last[1]
        same = (before.policy, before.budget, before.sinks) == (now.policy, now.budget, now.sinks)
        fits = budget.policy_rows <= budget.policy_bound and self.recalled <= budget.reserve
        if same and fits and (before.recall is None) == (now.recall is None):
            return self.selection
        return self._choice()

    def _choice(self) -> Selection:
        """Let the policy choose from all rows in the cache or the archive.

        Returns the chosen rows; none of them counts as restored by recall.
        """
        reachable, budget = self._store.reachable(), self.budget
        if budget.compacts_at_anchors:
            rows = budget.settings.policy.reduce(self.view_of(reachable, None))
            reachable = reachable if rows is None else reachable[rows.numpy()]
        if len(reachable) <= budget.policy_budget:
            return Selection(reachable, _NONE)
        if budget.unbounded:  # not all rows fit: continue with those that are held
            self.require(0)
            return Selection(self._ledger.held_positions.copy(), _NONE)
        chosen = budget.choose(self.view_of(reachable, self.round), budget.policy_budget)
        return Selection(reachable[chosen.numpy()], _NONE)

    def _hold(self, selection: Selection) -> CacheUpdate:
        """Evict and restore rows, so that the cache holds exactly the rows of `selection`.

        Returns records of the evicted and of the restored rows.
        """
        gone, came = _NONE, _NONE
        if not np.array_equal(selection.held, self._ledger.held_positions):
            gone, came = self._store.hold(selection.held)
            self._layers = ()
        self._ledger.recall(selection.recalled)
        self._insert(selection.layers)
        moves: CacheUpdate = []
        if len(gone):
            moves.append(EvictedRows(gone, self.count, self._ledger.seen))
        if len(came):
            moves.append(RestoredRows(came, self.count, self._ledger.seen))
        return moves

    def _insert(self, layers: tuple[Positions, ...]) -> None:
        """Insert archived rows that differ from layer to layer, right after the sinks.

        `layers[i]` are the stream positions of the rows for layer i. Rows inserted earlier are
        removed from the cache.
        """
        if layers is self._layers:
            return
        self._layers = layers
        if layers:
            sinks = int((self._ledger.held_positions < self.budget.sinks).sum())
            self._store.insert(sinks, layers)
        else:
            self._cache.remove_inserted()

    def _keep(self, num_keep: int) -> EvictedRows:
        """Let the policy choose `num_keep` rows that stay; evict the other rows.

        Rows that recall has restored stay, too. Returns the record of the evicted rows.
        """
        return self._keep_rows(self.budget.choose(self.view(self.round), num_keep))

    def _keep_rows(self, rows: Tensor) -> EvictedRows:
        """Evict all rows except those numbered `rows` [k] in the table that `view` returns.

        Rows that recall has restored stay, too. Returns the record of the evicted rows.
        """
        ledger = self._ledger
        if len(ledger.recalled):
            stays = np.union1d(self.budget.policy_positions[rows.numpy()], ledger.recalled)
            rows = torch.from_numpy(np.searchsorted(ledger.held_positions, stays))
        gone = self._store.keep(rows)
        return EvictedRows(gone, self.count, ledger.seen)
