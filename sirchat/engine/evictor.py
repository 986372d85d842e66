"""Decides which tokens the KV cache holds: chooses a `Placement`, which the store carries out.

Tokens move when room is needed, when settings or pins change, by undo and by recall.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.budget import Division, count_pins, divide_budget, pinned_mask, recall_limit
from sirchat.engine.extra_passes import recompute_rows
from sirchat.engine.reader import Reader
from sirchat.engine.types import CacheSettings, EvictedRows, RestoredRows, TurnRef
from sirchat.errors import SettingError
from sirchat.memory.held_rows import Role
from sirchat.memory.key_value_store import CacheCheckpoint, KeyValueStore
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, HeldRows
from sirchat.memory.placement import Placement

CacheUpdate = list[EvictedRows | RestoredRows]

_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _BeforeSwitch:
    """The state after the last forward pass, before the settings were switched."""

    settings: CacheSettings
    placement: Placement
    seen: int  # tokens read by then


class Evictor:
    """Decides which tokens of one conversation the KV cache holds, by the policy in the settings.

    `round` is the current round, whose newest tokens are protected from eviction. From
    `begin_recall` to `end_recall` the recalled tokens are held, and other tokens are set aside for
    them in the archive.
    """

    def __init__(self, settings: CacheSettings, reader: Reader, store: KeyValueStore) -> None:
        self.settings = settings
        self.context_length = reader.model.context_length
        self.round = 0
        self._ledger, self._cache, self._store = reader.ledger, reader.cache, store
        self._reader = reader
        self._expected_tokens = 0  # of the turn and its reply at most, under `before-turn`
        # Set by `switch`, with where it put the tokens: as long as these are there, switching back
        # is exact.
        self._before_switch: tuple[_BeforeSwitch, Placement] | None = None

    def divide_budget(self) -> Division:
        return divide_budget(self.settings, self._ledger, self.context_length)

    def view_held(self, round: int | None) -> HeldRows:
        """The held tokens that recall did not restore, as the policy's input.

        Sinks, pins and, if `round` is given, its newest tokens are protected from eviction.
        """
        return self.view_tokens(self._store.placement.held_without_recalled, round)

    def view_tokens(
        self, positions: Positions, round: int | None = None, division: Division | None = None
    ) -> HeldRows:
        """The tokens at stream `positions` [n], held or archived, as the policy's input.

        See `view_held`. `division` is the budget divided among them, computed here by default.
        """
        settings, ledger = self.settings, self._ledger
        if division is None:
            division = divide_budget(settings, ledger, self.context_length, positions)
        protected = (positions < division.sinks) | pinned_mask(settings, ledger, positions)
        if settings.protect and round is not None:
            is_current = ledger.column("round")[positions] == round
            protected |= is_current & (positions >= ledger.seen - division.protected)
        rows = ledger.view(positions, sinks=division.sinks, protected=protected)
        columns = dict[Any, Any]()
        if settings.policy.key_value_stats and len(positions):
            columns |= self._store.statistics(positions, settings.policy.key_value_stats)
        if settings.policy.needs == "keys" and len(positions):
            columns["keys"], columns["values"] = self._store.as_read(positions)
        return replace(rows, **columns) if columns else rows

    def make_room(self, count: int, division: Division | None = None) -> list[EvictedRows]:
        """Evict tokens, if necessary, so that `count` more fit; `division` is the current one.

        Right after an anchor, the policy's `reduce` evicts first. During recall, tokens of earlier
        rounds are set aside, then recalled tokens leave; if both are too few, recall ends.
        """
        evicted = self._reduce_at_anchor()
        if division is None or evicted:
            division = self.divide_budget()
        excess = self._cache.length + count - division.hard_bound
        if excess <= 0:
            return evicted
        if not self._store.has_recall:
            rows = self.view_tokens(self._ledger.held_positions, self.round, division)
            evicted += self._evict_all_but(rows, division.hard_bound - count)
        elif (placement := self._reduced_placement(excess)) is not None:
            self._place(placement)
        else:
            evicted += self.end_recall(count)
        return evicted

    def make_room_for_turn(self, count: int, max_new: int, turn: TurnRef) -> list[EvictedRows]:
        """Evict tokens before a user turn of `count` ids, as the setting `evict` says.

        Under `between-turns` the cache is enlarged for the turn and its reply.
        """
        evicted = self.end_recall()
        self.round, self._expected_tokens = turn.round, 0
        settings, division = self.settings, self.divide_budget()
        expected_tokens = count + max_new
        if settings.evict == "when-full" or not settings.policy.bounded:
            return evicted
        between_turns, rows = settings.evict == "between-turns", self.view_held(self.round)
        max_kept = division.total - (0 if between_turns else expected_tokens)
        num_keep = max(max_kept, int(rows.protected.sum()))
        if num_keep < len(rows):
            evicted += self._evict_all_but(rows, num_keep)
        if between_turns:
            self._cache.grow_to(min(division.hard_bound, self._cache.length + expected_tokens))
        else:
            self._expected_tokens = expected_tokens
        return evicted

    def recall_room(self, incoming: int) -> int:
        """Most recalled tokens that fit beside a turn of `incoming` ids; 0 if recall is off."""
        recall = self.settings.recall
        if recall is None or not self.settings.policy.bounded:
            return 0
        return recall_limit(recall.n, self.free_budget(incoming))

    def free_budget(self, incoming: int = 0) -> int:
        """The budget without sinks, pins and a turn of `incoming` ids, in tokens."""
        division = self.divide_budget()
        return min(division.total, division.hard_bound - incoming) - division.sinks - division.pins

    def begin_recall(
        self,
        chosen: Positions,
        *,
        incoming: int,
        focused: bool = False,
        scores: NDArray[np.float64] | None = None,
    ) -> CacheUpdate:
        """Hold the tokens at positions `chosen` [n] for the next turn, of `incoming` ids.

        The tokens that the policy ranks lowest are set aside for them; with `focused`, all but
        sinks, pins and the newest round. Tokens with the lowest `scores` [n] leave first when room
        is needed later. Raises ValueError if the tokens do not fit the budget.
        """
        moves: CacheUpdate = [*self.end_recall()]
        if not (len(chosen) or focused):
            return moves
        held, total = self._ledger.held_positions.copy(), self.divide_budget().total
        restored = np.setdiff1d(chosen, held)
        is_required = self.view_tokens(held).protected.numpy() | np.isin(held, chosen)
        max_kept = total - len(restored)
        if is_required.sum() > max_kept:
            raise ValueError(f"{len(restored)} tokens can't be recalled within budget {total}")
        candidates = held
        if focused:
            rounds = self._ledger.column("round")[held]
            is_near = is_required | (rounds == rounds.max(initial=0))
            candidates, is_required = held[is_near], is_required[is_near]
        elif self.settings.evict != "between-turns":  # which lets the turn exceed the budget
            max_kept -= max(incoming, self._expected_tokens)
        kept = self._choose_with_required(candidates, is_required, max_kept)
        aside = np.setdiff1d(held, kept, assume_unique=True)
        self.reread(restored)
        wanted = chosen if scores is None else chosen[np.argsort(scores, kind="stable")]
        return moves + self._place(Placement(np.union1d(kept, restored), restored, aside, wanted))

    def end_recall(self, count: int = 0) -> list[EvictedRows]:
        """Evict the recalled tokens, and restore the tokens that were set aside for them.

        Returns tokens that are evicted instead, if these would leave no room for `count` more.
        """
        if not self._store.has_recall:
            return []
        own, kept = self._store.placement.policy_positions, self.held_without_recall(count)
        self._place(Placement(kept))
        evicted = np.setdiff1d(own, kept, assume_unique=True)
        return [EvictedRows(evicted, self._cache.length, self._ledger.seen)] if len(evicted) else []

    @contextmanager
    def ending_recall_on_error(self) -> Iterator[None]:
        """Context manager: ends recall if the block fails or ends early."""
        try:
            yield
        except BaseException:
            self.end_recall()
            raise

    def held_without_recall(self, count: int = 0) -> Positions:
        """Stream positions [n] held if recall ended now, with room for `count` more tokens."""
        placement = self._store.placement
        if not placement.has_recall:
            return placement.held
        most = self.divide_budget().hard_bound - count
        return self._choose_at_most(placement.policy_positions, most)

    @contextmanager
    def temporary_placement(self, placement: Placement) -> Iterator[None]:
        """Context manager: places the tokens as `placement` says; afterwards as before."""
        before = self._store.placement
        with self._store.without_limit():
            self._place(placement)
            try:
                yield
            finally:
                self._place(before)

    def next_evicted(self, *, in_round: bool) -> Positions:
        """Positions [k] of the tokens that will be evicted next; empty while there is much room.

        `in_round`: whether the newest tokens of the current round are protected.
        """
        settings, division = self.settings, self.divide_budget()
        if not settings.policy.bounded:
            return _NO_POSITIONS
        if self._cache.length + 2 * division.eviction_block <= division.total:
            return _NO_POSITIONS
        rows, block = self.view_held(self.round if in_round else None), division.eviction_block
        if settings.evict == "between-turns":
            rows, block = self.view_held(None), max(0, len(rows) - division.total)
        count = min(block, int((~rows.protected).sum()))
        if not count:
            return _NO_POSITIONS
        leaves = np.ones(len(rows), bool)
        leaves[self._choose_rows(rows, len(rows) - count).numpy()] = False
        return self._store.placement.held_without_recalled[leaves]

    def switch(self, settings: CacheSettings, pins: int = 0) -> CacheUpdate:
        """Change the settings; the new policy chooses among all held and archived tokens.

        Switching back before the next forward pass restores exactly the old cache. `pins` tokens
        will be pinned next. Raises SettingError, changing nothing, if sinks and pins leave too
        little room.
        """
        old, self.settings = self.settings, settings
        try:
            self.check_pins(pins)
            placement = self._placement_after_switch(old)
        except Exception:  # whatever the new policy raises
            self.settings = old
            raise
        before = self._state_to_switch_back_to()
        before = before or _BeforeSwitch(old, self._store.placement, self._ledger.seen)
        self._before_switch = before, placement
        if settings.policy.bounded:
            self._cache.grow_to(settings.budget)
        moves = self._place(placement)
        is_moved = (settings.archive, settings.folder) != (old.archive, old.folder)
        self._cache.set_positions(absolute_positions=settings.absolute_positions)
        if is_moved:
            moves += self.end_recall()  # what is aside is in the old archive
            self._store.set_limit(settings.archive, settings.folder)
        if settings.policy.bounded:
            self._cache.shrink_to(settings.budget)
        return moves

    def reread(self, positions: Positions) -> None:
        """Compute and archive the keys and values of the lost tokens among `positions` again."""
        lost = self._store.rereadable(positions)
        if len(lost):
            sinks = max(1, self.settings.sinks)  # models expect a first token to attend to
            for rows in recompute_rows(self._reader, lost, sinks):
                self._store.add_reread(rows)

    def pin(self, positions: Positions, pinned: bool) -> CacheUpdate:
        """Pin or unpin the tokens at these positions; then the policy chooses among all tokens.

        Raises SettingError, changing nothing, if the pins would leave too little room.
        """
        before = self._ledger.pinned_positions
        if pinned:
            new = ~np.isin(positions, before) & (positions >= self.divide_budget().sinks)
            self.check_pins(int(new.sum()))
            self.reread(positions)
        self._ledger.pin(positions, pinned)
        try:
            chosen = self._choose()
        except Exception:  # whatever a policy raises
            self._ledger.pin_only(before)
            raise
        return self._place(chosen)

    def pin_held(self, positions: Positions, pins_released: int = 0) -> int:
        """Pin those tokens at `positions` that are held, and move none; returns their number.

        Raises SettingError, changing nothing, if the pins would leave too little room even after
        `pins_released` others are unpinned.
        """
        held = np.intersect1d(positions, self._store.placement.held_without_recalled)
        is_new = ~np.isin(held, self._ledger.pinned_positions)
        self.check_pins(int((is_new & (held >= self.divide_budget().sinks)).sum()) - pins_released)
        self._ledger.pin(held, True)
        self._place(self._store.placement)  # a new one: no switch leads back behind the pins
        return len(held)

    def unpin_held(self, positions: Positions) -> None:
        self._ledger.pin(positions, False)
        self._place(self._store.placement)

    def exclude(self, positions: Positions, excluded: bool = True) -> CacheUpdate:
        """Evict these tokens, except sinks, for good; with `excluded` False, let them return."""
        positions = positions[positions >= self.divide_budget().sinks]
        self._ledger.flag(Flag.EXCLUDED, positions, excluded)
        placement = self._store.placement
        return self._place(placement.without(positions) if excluded else placement)

    def evict_until_recalled(self, positions: Positions) -> None:
        """Evict the tokens at these positions. From now on, only recall may restore them."""
        ledger = self._ledger
        ledger.pin(np.intersect1d(positions, ledger.pinned_positions), False)
        ledger.left_out = np.union1d(ledger.left_out, positions)
        self._place(self._store.placement.without(positions))

    @contextmanager
    def without_tokens_from(self, position: int) -> Iterator[None]:
        """Context manager: archives the tokens from stream `position` on, and turns recall off.

        The tokens stay archived afterwards, so the archive must be unlimited. Recall must have
        ended.
        """
        settings, held = self.settings, self._ledger.held_positions.copy()
        self._place(Placement(held[held < position]))
        self.settings = replace(settings, recall=None)
        try:
            yield
        finally:
            self.settings = settings

    def hold(self, positions: Positions) -> None:
        """Restore the tokens at these positions; if not all tokens fit, the policy chooses."""
        held = np.union1d(self._ledger.held_positions, positions)
        self._place(Placement(self._choose_at_most(held, self.divide_budget().hard_bound)))

    def check_pins(self, new_pins: int, positions: Positions | None = None) -> None:
        """Raise SettingError if `new_pins` more pins would leave too little room.

        Existing pins are counted at `positions`, by default all held and archived tokens.
        """
        division = self.divide_budget()
        if division.max_pins is None:
            return
        positions = self._reachable() if positions is None else positions
        pins = count_pins(self.settings, self._ledger, positions)
        pins += new_pins - min(new_pins, max(0, division.sinks - self._ledger.seen))
        if pins > division.max_pins:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {division.total} allows only "
                f"{division.max_pins}",
                hint=f"raise the budget, {self._unpinning_hint(positions)}",
            )

    def _unpinning_hint(self, positions: Positions) -> str:
        """How the user can unpin most: the turn with most pins, if that is no system prompt."""
        pinned = positions[pinned_mask(self.settings, self._ledger, positions)]
        roles = self._ledger.column("role")[pinned]
        of_turn = self._ledger.column("turn")[pinned[roles != Role.SYSTEM]]
        if not len(of_turn) or 2 * len(of_turn) < len(pinned):
            return "unpin something, turn off tools, or set pin_system false"
        turn = int(np.bincount(of_turn).argmax())
        return f"or unpin something: /unpin turn {turn} lets go of {(of_turn == turn).sum()}"

    def undo(self, to: CacheCheckpoint, round: int, *, keep_pins: bool) -> CacheUpdate:
        """Return to the checkpoint `to`, in `round`; `keep_pins` keeps the current pins.

        If the old placement does not fit the current settings, the policy chooses again. Raises
        LookupError, changing nothing, if a token of the checkpoint is lost.
        """
        self._cache.grow_to(len(to.placement.held))
        self._store.undo(to)
        self.round = round
        if keep_pins:  # and pin again the rules that were unpinned since
            is_rule = self._ledger.column("flags")[to.pinned] & np.uint8(Flag.RULE) != 0
            self._ledger.pin(to.pinned[is_rule], True)
        else:
            self._ledger.pin_only(to.pinned)
            for rule in to.rules:
                self._ledger.flag(Flag.RULE, rule, True)
        if not self._fits() or not self._holds_pins(self._store.placement):
            return self._place(self._choose())
        return []

    def erase(self, positions: Positions) -> None:
        """Delete the tokens at these positions from cache and archive; ledger rows become blank."""
        self._store.erase(positions)
        self._ledger.erase(positions)

    def _reachable(self) -> Positions:
        """Stream positions of all tokens that can be held, with those set aside for recall."""
        reachable, aside = self._store.reachable(), self._store.placement.aside
        if len(left_out := self._ledger.left_out):
            reachable = np.setdiff1d(reachable, left_out, assume_unique=True)
        return np.union1d(reachable, aside) if len(aside) else reachable

    def _reduce_at_anchor(self) -> list[EvictedRows]:
        """Right after an anchor, evict the tokens that the policy's `reduce` leaves out."""
        policy, flags = self.settings.policy, self._ledger.column("flags")
        if not (policy.compacts_at_anchors and len(flags) and flags[-1] & Flag.ANCHOR):
            return []
        placement = self._store.placement
        own = placement.policy_positions
        kept = policy.reduce(self.view_tokens(own))
        if kept is None:
            return []
        evicted = np.setdiff1d(own, own[kept.numpy()], assume_unique=True)
        self._place(placement.without(evicted))
        return [EvictedRows(evicted, self._cache.length, self._ledger.seen)]

    def _fits(self) -> bool:
        return self._cache.length <= self.divide_budget().hard_bound

    def _holds_pins(self, placement: Placement) -> bool:
        """Whether all pinned tokens that can be held are held, and not only as recalled tokens."""
        reachable = self._reachable()
        pinned = reachable[pinned_mask(self.settings, self._ledger, reachable)]
        return bool(np.isin(pinned, placement.held_without_recalled).all())

    def _state_to_switch_back_to(self) -> _BeforeSwitch | None:
        """The state before the last switch; None without a switch, or if tokens moved since."""
        if self._before_switch is None:
            return None
        state, placement_since = self._before_switch
        is_unchanged = state.seen == self._ledger.seen and self._store.is_placed(placement_since)
        return state if is_unchanged else None

    def _placement_after_switch(self, old: CacheSettings) -> Placement:
        new, before = self.settings, self._state_to_switch_back_to()
        if before is not None and before.settings == new:
            former = before.placement
            needed = np.union1d(former.held, former.aside)
            if self._store.has(needed) and self._holds_pins(former):
                return former
        present = self._store.placement
        is_same = (old.policy, old.budget, old.sinks) == (new.policy, new.budget, new.sinks)
        if is_same and self._fits() and self._holds_pins(present):
            return present
        return self._choose()

    def _choose(self) -> Placement:
        """The policy's choice among all held and archived tokens; none counts as recalled."""
        policy, reachable = self.settings.policy, self._reachable()
        if policy.compacts_at_anchors:
            rows = policy.reduce(self.view_tokens(reachable))
            reachable = reachable if rows is None else reachable[rows.numpy()]
        num_keep = self.divide_budget().total
        if len(reachable) <= num_keep:
            return Placement(reachable)
        if not policy.bounded:  # not all fit: continue with those that are held
            if self._cache.length > num_keep:
                policy.keep(self.view_held(None), num_keep)  # raises the error, in its own words
            return Placement(self._ledger.held_positions.copy())
        chosen = self._choose_rows(self.view_tokens(reachable, self.round), num_keep)
        return Placement(reachable[chosen.numpy()])

    def _place(self, placement: Placement) -> CacheUpdate:
        """Evict and restore tokens, so that they are where `placement` says."""
        evicted, restored = self._store.place(placement)
        moves: CacheUpdate = []
        if len(evicted):
            moves.append(EvictedRows(evicted, self._cache.length, self._ledger.seen))
        if len(restored):
            moves.append(RestoredRows(restored, self._cache.length, self._ledger.seen))
        return moves

    def _evict_all_but(self, rows: HeldRows, num_keep: int) -> list[EvictedRows]:
        """Evict all held `rows` but the `num_keep` that the policy chooses."""
        kept = self._choose_rows(rows, num_keep).numpy()
        moves = self._place(Placement(self._ledger.held_positions[kept]))
        return [move for move in moves if isinstance(move, EvictedRows)]

    def _reduced_placement(self, excess: int) -> Placement | None:
        """The placement after `excess` tokens have left; None if recall must end for that."""
        placement = self._store.placement
        own, wanted = placement.held_without_recalled, placement.wanted
        is_current = self._ledger.column("round")[own] == self.round
        is_fixed = self.view_tokens(own).protected.numpy() | is_current
        is_required = is_fixed | np.isin(own, wanted)
        kept = self._choose_with_required(own, is_required, len(own) - excess)
        excess -= len(own) - len(kept)
        leaving = wanted[~np.isin(wanted, own[is_fixed])][: max(0, excess)]
        if excess > len(leaving):
            return None
        held = np.setdiff1d(np.union1d(kept, placement.recalled), leaving, assume_unique=True)
        recalled = np.setdiff1d(placement.recalled, leaving, assume_unique=True)
        aside = np.union1d(placement.aside, np.setdiff1d(own, held, assume_unique=True))
        return Placement(held, recalled, aside, wanted[~np.isin(wanted, leaving)])

    def _choose_with_required(
        self, positions: Positions, is_required: NDArray[np.bool_], max_kept: int
    ) -> Positions:
        """The required tokens at `positions` [n], and others up to `max_kept` in all."""
        num_keep = max(max_kept, int(is_required.sum()))
        if num_keep >= len(positions):
            return positions
        rows = replace(self.view_tokens(positions), protected=torch.from_numpy(is_required))
        kept: Positions = positions[self._choose_rows(rows, num_keep).numpy()]
        return kept

    def _choose_at_most(self, positions: Positions, max_kept: int) -> Positions:
        """The tokens at these positions; if more than `max_kept`, those that the policy keeps."""
        if len(positions) <= max_kept:
            return positions
        rows = self.view_tokens(positions, self.round)
        kept: Positions = positions[self._choose_rows(rows, max_kept).numpy()]
        return kept

    def _choose_rows(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Row numbers of the `num_keep` rows that the policy keeps; SettingError if invalid."""
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
