"""Evicts tokens from the KV cache: to make room within the budget, or because they are unwanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from sirchat.engine.policy_choice import PolicyChoice
from sirchat.engine.recalled_tokens import RecalledTokens
from sirchat.engine.types import TurnRef
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag
from sirchat.memory.placement import EvictedRows, Moves, Placement

_NO_POSITIONS = np.zeros(0, np.int64)


class Evictor:
    """Makes room for new tokens in the KV cache of one conversation, by its policy's choice."""

    def __init__(self, choice: PolicyChoice, recalled: RecalledTokens) -> None:
        self._choice, self._recalled = choice, recalled
        self._store, self._ledger, self._cache = choice.store, choice.ledger, choice.store.cache

    def make_room(self, count: int) -> list[EvictedRows]:
        """Evict tokens, if necessary, so that `count` more fit.

        Right after an anchor, the policy's `reduce` evicts first. During recall, tokens of earlier
        rounds are set aside, then recalled tokens leave; if both are too few, recall ends.
        """
        evicted = self._reduce_at_anchor()
        excess = self._cache.length + count - self._choice.divide_budget().hard_bound
        if excess <= 0 or self._recalled.step_aside(excess):
            return evicted
        return evicted + self._recalled.end(count)

    def make_room_for_turn(self, count: int, max_new: int, turn: TurnRef) -> list[EvictedRows]:
        """Evict tokens before a user turn of `count` ids, as the setting `evict` says.

        Under `between-turns` the cache is enlarged for the turn and its reply.
        """
        evicted = self._recalled.end()
        choice, expected_tokens = self._choice, count + max_new
        choice.round, self._recalled.expected_tokens = turn.round, 0
        if choice.settings.evict == "when-full" or not choice.settings.policy.bounded:
            return evicted
        division, rows = (
            choice.divide_budget(),
            choice.view(self._ledger.held_positions, turn.round),
        )
        may_exceed = choice.settings.evict == "between-turns"
        most = division.total - (0 if may_exceed else expected_tokens)
        num_keep = max(most, int(rows.protected.sum()))
        if num_keep < len(rows):
            evicted += self._store.evict_all_but(choice.keep(rows, num_keep))
        if may_exceed:
            self._cache.grow_to(min(division.hard_bound, self._cache.length + expected_tokens))
        else:
            self._recalled.expected_tokens = expected_tokens
        return evicted

    def next_evicted(self, round: int | None) -> Positions:
        """Positions [k] of the tokens that will be evicted next; empty while there is much room.

        If `round` is given, its newest tokens are protected.
        """
        choice, division = self._choice, self._choice.divide_budget()
        has_room = self._cache.length + 2 * division.eviction_block <= division.total
        if has_room or not choice.settings.policy.bounded:
            return _NO_POSITIONS
        held, block = self._store.placement.held_without_recalled, division.eviction_block
        if choice.settings.evict == "between-turns":
            round, block = None, max(0, len(held) - division.total)
        rows = choice.view(held, round)
        count = min(block, int((~rows.protected).sum()))
        if not count:
            return _NO_POSITIONS
        return np.setdiff1d(held, choice.keep(rows, len(held) - count), assume_unique=True)

    def exclude(self, positions: Positions) -> Moves:
        """Evict these tokens, except sinks, for good: only an undo restores them."""
        positions = positions[positions >= self._choice.settings.honoured_sinks]
        self._ledger.flag(Flag.EXCLUDED, positions, True)
        return self._store.place(self._store.placement.without(positions))

    def evict_until_recalled(self, positions: Positions) -> None:
        """Evict the tokens at these positions. From now on, only recall may restore them."""
        ledger = self._ledger
        ledger.pin(np.intersect1d(positions, ledger.pinned_positions), False)
        ledger.left_out = np.union1d(ledger.left_out, positions)
        self._store.place(self._store.placement.without(positions))

    @contextmanager
    def without_tokens_from(self, position: int) -> Iterator[None]:
        """Context manager: archives the tokens from stream `position` on, and turns recall off.

        The tokens stay archived afterwards, so the archive must be unlimited. Recall must have
        ended.
        """
        settings, held = self._choice.settings, self._ledger.held_positions.copy()
        self._store.place(Placement(held[held < position]))
        self._choice.settings = replace(settings, recall=None)
        try:
            yield
        finally:
            self._choice.settings = settings

    def hold(self, positions: Positions) -> None:
        """Restore the tokens at these positions; if not all tokens fit, the policy chooses."""
        held = np.union1d(self._ledger.held_positions, positions)
        most = self._choice.divide_budget().hard_bound
        self._store.place(Placement(self._choice.keep_at_most(held, most)))

    def _reduce_at_anchor(self) -> list[EvictedRows]:
        """Right after an anchor, evict the tokens that the policy's `reduce` leaves out."""
        flags, placement = self._ledger.column("flags"), self._store.placement
        if not (len(flags) and flags[-1] & Flag.ANCHOR):
            return []
        own = placement.policy_positions
        evicted = np.setdiff1d(own, self._choice.reduce(own), assume_unique=True)
        if len(evicted):
            self._store.place(placement.without(evicted))
        return self._store.evicted_rows(evicted)
