"""Decides which tokens the KV cache holds; the only place that evicts and restores tokens.

Tokens move when room is needed, when settings or pins change, by undo and by recall.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.budget import Division, count_pins, divide_budget, is_pinned
from sirchat.engine.types import (
    CacheSettings,
    EvictedRows,
    RestoredRows,
    Selection,
    TurnRef,
)
from sirchat.errors import SettingError
from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_value_store import CacheCheckpoint, KeyValueStore
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, HeldRows, Ledger

CacheUpdate = list[EvictedRows | RestoredRows]

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _LastPass:
    """The state after the last forward pass, before the settings were switched."""

    settings: CacheSettings
    selection: Selection  # what the cache held
    seen: int  # tokens read by then


class Residency:
    """Decides which tokens of one conversation the KV cache holds, by the settings' policy.

    `round` is the number of the current round, whose newest tokens are protected from eviction.
    """

    def __init__(
        self,
        settings: CacheSettings,
        context_length: int,
        ledger: Ledger,
        cache: BoundedCache,
        store: KeyValueStore,
    ) -> None:
        self.settings = settings
        self.context_length = context_length
        self.round = 0
        self._ledger, self._cache, self._store = ledger, cache, store
        self._layers: tuple[Positions, ...] = ()  # recalled tokens of single layers
        # Noted by `switch`, so that switching back is exact; None if tokens moved otherwise.
        self._last_pass: _LastPass | None = None

    @property
    def recalled_count(self) -> int:
        """Number of cache slots that recall has filled for this round."""
        return self._cache.inserted_count + len(self._ledger.recalled)

    @property
    def recalled_positions(self) -> Positions:
        """Stream positions, ascending, of the tokens that recall has restored in any layer."""
        return np.unique(np.concatenate([self._ledger.recalled, *self._layers]))

    @property
    def selection(self) -> Selection:
        """What the cache holds now."""
        ledger = self._ledger
        return Selection(ledger.held_positions.copy(), ledger.recalled, self._layers)

    def divide_budget(self) -> Division:
        """How the budget is divided now, with the settings in force."""
        return divide_budget(self.settings, self._ledger, self.context_length)

    def view(self, round: int | None) -> HeldRows:
        """The held tokens that recall has not restored, as the policy sees them.

        Sinks and pins are protected; with a `round`, its newest tokens are, too.
        """
        return self.view_of(self._policy_positions(), round)

    def view_of(
        self, at: Positions, round: int | None = None, division: Division | None = None
    ) -> HeldRows:
        """The tokens at stream positions `at` [n], held or archived, as the policy sees them.

        `division` is that of the budget, with the pins among `at`; see `view`.
        """
        settings, ledger = self.settings, self._ledger
        if division is None:
            division = divide_budget(settings, ledger, self.context_length, at)
        protected = (at < division.sinks) | is_pinned(settings, ledger, at)
        if settings.protect and round is not None:
            is_current = ledger.column("round")[at] == round
            protected |= is_current & (at >= ledger.seen - division.protected)
        rows = ledger.view(at, sinks=division.sinks, protected=protected)
        if not (settings.policy.key_value_stats and len(at)):
            return rows
        columns: dict[Any, Any] = self._store.statistics(at, settings.policy.key_value_stats)
        return replace(rows, **columns)

    def make_room(self, count: int, division: Division | None = None) -> list[EvictedRows]:
        """Evict tokens, if necessary, so that `count` more fit; `division` is the present one.

        Right after an anchor (the end of a sentence or round), the policy's `reduce` evicts first.
        """
        policy, evicted = self.settings.policy, list[EvictedRows]()
        if policy.compacts_at_anchors and self._ends_at_anchor():
            rows = policy.reduce(self.view(None))
            if rows is not None:
                evicted.append(self._keep_rows(rows))
                division = None
        division = division or self.divide_budget()
        if self.recalled_count > division.reserve:  # new pins have taken some of the reserve
            self.evict_recalled()
            division = self.divide_budget()
        if division.policy_rows + count > division.policy_bound:
            evicted.append(self._keep(division.policy_bound - count, division))
        return evicted

    def make_room_for_turn(self, count: int, max_new_tokens: int, at: TurnRef) -> list[EvictedRows]:
        """Evict tokens before the user turn `at` of `count` ids, as the setting `evict` says.

        If the turn and all tokens so far exceed the budget, the reserve for recall is freed first.
        Under `between-turns` the cache is enlarged for the turn and its reply.
        """
        self.round = at.round
        settings, division, to_come = self.settings, self.divide_budget(), count + max_new_tokens
        evicted = list[EvictedRows]()
        without_reserve = division.total - division.full_reserve
        if self._ledger.seen + count > division.total and division.policy_rows > without_reserve:
            evicted.append(self._keep(without_reserve, division))
            division = self.divide_budget()
        if settings.evict == "when-full" or not settings.policy.bounded:
            return evicted
        between_turns = settings.evict == "between-turns"
        most = division.policy_budget - (0 if between_turns else to_come)
        if division.policy_rows > most:
            num_keep = max(most, int(self.view(self.round).protected.sum()))
            if num_keep < division.policy_rows:
                evicted.append(self._keep(num_keep, division))
        if between_turns:
            self._cache.grow_to(min(division.hard_bound, self._cache.length + to_come))
        return evicted

    def next_evicted(self, *, in_round: bool) -> Positions:
        """Positions [k] of the tokens that will be evicted next; empty while there is much room.

        `in_round`: whether the newest tokens of the current round are protected.
        """
        settings, division = self.settings, self.divide_budget()
        if not settings.policy.bounded:
            return _NONE
        if division.policy_rows + 2 * division.eviction_block <= division.policy_budget:
            return _NONE
        rows, block = self.view(self.round if in_round else None), division.eviction_block
        if settings.evict == "between-turns":
            rows, block = self.view(None), max(0, division.policy_rows - division.policy_budget)
        count = min(block, int((~rows.protected).sum()))
        if not count:
            return _NONE
        leaves = np.ones(len(rows), bool)
        leaves[settings.policy.keep(rows, len(rows) - count).numpy()] = False
        return self._policy_positions()[leaves]

    def switch(self, settings: CacheSettings, pins: int = 0) -> CacheUpdate:
        """Change the settings; the new policy chooses among all tokens held or archived.

        If `settings` are again those of the last forward pass, the cache gets exactly what it held
        after it. `pins` tokens will be pinned next. Raises SettingError, changing nothing, if sinks
        and pins leave too little room.
        """
        old, self.settings = self.settings, settings
        try:
            self.check_pins(pins)
            selection = self._selection_after_switch(old)
        except Exception:  # whatever the new policy raises
            self.settings = old
            raise
        if self._last_pass_if_unread() is None:
            self._last_pass = _LastPass(old, self.selection, self._ledger.seen)
        if settings.policy.bounded:
            self._cache.grow_to(settings.budget)
        moves = self._apply_selection(selection)
        self._cache.set_positions(absolute_positions=settings.absolute_positions)
        if (settings.archive, settings.folder) != (old.archive, old.folder):
            self._store.set_limit(settings.archive, settings.folder)
        return moves

    def pin(self, positions: Positions, pinned: bool) -> CacheUpdate:
        """Pin or unpin the tokens at these positions; then the policy chooses among all tokens.

        Raises SettingError, changing nothing, if the pins would leave too little room.
        """
        before = self._ledger.pinned_positions
        if pinned:
            new = ~np.isin(positions, before) & (positions >= self.divide_budget().sinks)
            self.check_pins(int(new.sum()))
        self._ledger.pin(positions, pinned)
        try:
            chosen = self._choose_selection()
        except Exception:  # whatever a policy raises
            self._ledger.pin_only(before)
            raise
        self._last_pass = None
        return self._apply_selection(chosen)

    def exclude(self, positions: Positions, excluded: bool = True) -> CacheUpdate:
        """Evict the tokens at these positions, except sinks, for good; or let them return again."""
        positions = positions[positions >= self.divide_budget().sinks]
        self._ledger.flag(Flag.EXCLUDED, positions, excluded)
        self._last_pass = None
        if not excluded:
            return []
        held, recalled = (
            np.setdiff1d(among, positions, assume_unique=True)
            for among in (self._ledger.held_positions, self._ledger.recalled)
        )
        return self._apply_selection(Selection(held, recalled, self._layers))

    def check_pins(self, more: int, among: Positions | None = None) -> None:
        """Raise SettingError if the pins, and `more` tokens, would leave too little room.

        The pins are those among the positions `among`, by default of all tokens held or archived.
        """
        division = self.divide_budget()
        if division.most_pins is None:
            return
        pins = count_pins(
            self.settings, self._ledger, self._store.reachable() if among is None else among
        )
        pins += more - min(more, max(0, division.sinks - self._ledger.seen))
        if pins > division.most_pins:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {division.total} allows only "
                f"{division.most_pins}",
                hint="raise the budget, /unpin something, or set pin_system to false",
            )

    def undo(
        self, to: CacheCheckpoint, selection: Selection, round: int, *, keep_pins: bool
    ) -> CacheUpdate:
        """Go back to the checkpoint `to`, with what `selection` held and recalled in `round`.

        If that does not fit the present settings, the policy chooses again; with `keep_pins`, the
        present pins stay. Raises LookupError, changing nothing, if a held token is lost.
        """
        self._cache.grow_to(len(to.held))
        self._store.undo(to)
        self.round, self._layers = round, ()
        self._ledger.mark_recalled(selection.recalled)
        with suppress(LookupError):  # the archive may have dropped the rows of single layers
            self._insert(selection.layers)
        self._last_pass = None
        if not keep_pins:
            self._ledger.pin_only(to.pinned)
        if not self._fits() or not self._holds_pins(self.selection):
            return self._apply_selection(self._choose_selection())
        return []

    def restore_recalled(
        self, chosen: Positions, layers: tuple[Positions, ...] = ()
    ) -> CacheUpdate:
        """Restore archived tokens for the next turn; evict those that recall restored before.

        All layers get the tokens at the ascending positions `chosen`, layer i those at `layers[i]`.
        """
        held = np.union1d(self._policy_positions(), chosen)
        return self._apply_selection(
            Selection(held, chosen, layers if layers and len(layers[0]) else ())
        )

    def evict_recalled(self) -> CacheUpdate:
        """Evict all tokens that recall has restored."""
        if not self.recalled_count:
            return []
        return self._apply_selection(Selection(self._policy_positions(), _NONE))

    def erase(self, positions: Positions) -> None:
        """Delete the tokens at these positions from cache and archive; the ledger keeps a blank."""
        self._store.erase(positions)
        self._layers = ()
        self._ledger.erase(positions)
        self._last_pass = None

    def _policy_positions(self) -> Positions:
        """Stream positions [n] of the held tokens that recall has not restored."""
        held, recalled = self._ledger.held_positions, self._ledger.recalled
        return np.setdiff1d(held, recalled, assume_unique=True) if len(recalled) else held

    def _ends_at_anchor(self) -> bool:
        flags = self._ledger.column("flags")
        return bool(len(flags) and flags[-1] & Flag.ANCHOR)

    def _fits(self) -> bool:
        division = self.divide_budget()
        return (
            self.recalled_count <= division.reserve
            and division.policy_rows <= division.policy_bound
        )

    def _holds_pins(self, selection: Selection) -> bool:
        """Whether all pinned tokens that can be held are, and not for recall, which evicts them."""
        reachable = self._store.reachable()
        pinned = reachable[is_pinned(self.settings, self._ledger, reachable)]
        held = np.setdiff1d(selection.held, selection.recalled, assume_unique=True)
        return bool(np.isin(pinned, held).all())

    def _last_pass_if_unread(self) -> _LastPass | None:
        """The state noted after the last pass; None if there is none, or tokens were read since."""
        last = self._last_pass
        return last if last is not None and last.seen == self._ledger.seen else None

    def _selection_after_switch(self, old: CacheSettings) -> Selection:
        """What the cache must hold, after the settings have changed from `old`."""
        new, selection, last = self.settings, self.selection, self._last_pass_if_unread()
        if last is not None and last.settings == new:
            held_then = last.selection
            if self._store.has(held_then.held) and self._holds_pins(held_then):
                return held_then
        is_same = (old.policy, old.budget, old.sinks) == (new.policy, new.budget, new.sinks)
        is_same &= (old.recall is None) == (new.recall is None)
        if is_same and self._fits() and self._holds_pins(selection):
            return selection
        return self._choose_selection()

    def _choose_selection(self) -> Selection:
        """Let the policy choose among all tokens held or archived; none counts as recalled."""
        policy, reachable = self.settings.policy, self._store.reachable()
        if policy.compacts_at_anchors:
            rows = policy.reduce(self.view_of(reachable))
            reachable = reachable if rows is None else reachable[rows.numpy()]
        num_keep = self.divide_budget().policy_budget
        if len(reachable) <= num_keep:
            return Selection(reachable, _NONE)
        if not policy.bounded:  # not all fit: continue with those that are held
            if self._cache.length > num_keep:
                policy.keep(self.view(None), num_keep)  # raises the error, in its own words
            return Selection(self._ledger.held_positions.copy(), _NONE)
        chosen = self._choose_rows(self.view_of(reachable, self.round), num_keep)
        return Selection(reachable[chosen.numpy()], _NONE)

    def _apply_selection(self, selection: Selection) -> CacheUpdate:
        """Evict and restore tokens, so that the cache holds exactly `selection`."""
        gone, came = _NONE, _NONE
        if not np.array_equal(selection.held, self._ledger.held_positions):
            gone, came = self._store.hold(selection.held)
            self._layers = ()
        self._ledger.mark_recalled(selection.recalled)
        self._insert(selection.layers)
        moves: CacheUpdate = []
        if len(gone):
            moves.append(EvictedRows(gone, self._cache.length, self._ledger.seen))
        if len(came):
            moves.append(RestoredRows(came, self._cache.length, self._ledger.seen))
        return moves

    def _insert(self, layers: tuple[Positions, ...]) -> None:
        """Insert archived tokens, for layer i those at `layers[i]`, right after the sinks.

        Tokens inserted earlier are removed; if `layers` is empty, nothing is inserted.
        """
        if layers is self._layers:
            return
        self._layers = layers
        if layers:
            sinks = int((self._ledger.held_positions < self.divide_budget().sinks).sum())
            self._store.insert(sinks, layers)
        else:
            self._cache.remove_inserted()

    def _keep(self, num_keep: int, division: Division) -> EvictedRows:
        """Let the policy choose `num_keep` tokens that stay, beside the recalled ones."""
        held = self._policy_positions()
        # The pins that count are those among the rows that the policy sees; recall restores none.
        rows = self.view_of(held, self.round, None if len(self._ledger.recalled) else division)
        return self._keep_rows(self._choose_rows(rows, num_keep))

    def _keep_rows(self, rows: Tensor) -> EvictedRows:
        """Evict all but the rows numbered `rows` [k] in the table of `view`, and recalled ones."""
        ledger = self._ledger
        if len(ledger.recalled):
            stays = np.union1d(self._policy_positions()[rows.numpy()], ledger.recalled)
            rows = torch.from_numpy(np.searchsorted(ledger.held_positions, stays))
        return EvictedRows(self._store.keep(rows), self._cache.length, ledger.seen)

    def _choose_rows(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Let the policy choose which `num_keep` of the `rows` stay; returns their numbers.

        Raises SettingError for numbers that are not valid, or that leave out a protected row.
        """
        chosen = self.settings.policy.keep(rows, num_keep)
        if not _is_valid_choice(chosen, rows, num_keep):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} made an invalid choice of tokens",
                hint="`sirchat policies check` shows why; /policy NAME chooses another policy",
            )
        return chosen


def _is_valid_choice(chosen: Tensor, rows: HeldRows, num_keep: int) -> bool:
    """Whether `chosen` are `num_keep` ascending row numbers that include all protected rows."""
    if len(chosen) != num_keep or not bool((chosen.diff() > 0).all()):
        return False
    if num_keep and not (int(chosen[0]) >= 0 and int(chosen[-1]) < len(rows)):
        return False
    return int(rows.protected[chosen].sum()) == int(rows.protected.sum())
