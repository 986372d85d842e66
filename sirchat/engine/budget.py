"""The arithmetic of a budget: how many cache rows are for sinks, pins, the policy and recall.

A row is the place of one token. budget = sinks + pins + E + reserve. Sinks (the first tokens) and
pins are never evicted; the policy decides which tokens take the E rows; the reserve is for tokens
that recall restores from the archive. The cache never has more rows than the budget, unless rows
are evicted only between turns: then a turn and its reply may exceed it, up to the model's context
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.records import CacheSettings
from sirchat.errors import SettingError
from sirchat.memory.ledger import Flag, HeldRows, Ledger

Positions = NDArray[np.int64]

_LEAST = 8
"""Minimum number of rows that sinks and pins must leave to the policy."""

_USUAL_RESERVE, _OWN_ROWS = 400, 64

_AT_ONCE = 1024
"""Maximum number of ids in a forward pass that reads several chunks.

Ctrl-C is handled only between passes.
"""


@dataclass(frozen=True, eq=False)
class Budget:
    """How many rows one conversation may hold in the cache, under its `settings`.

    `context_length` is the model's maximum, in tokens. It is the budget of a policy that never
    evicts, and the maximum within a turn if rows are evicted only between turns.
    """

    settings: CacheSettings
    ledger: Ledger
    context_length: int

    @property
    def unbounded(self) -> bool:
        """Whether the policy never evicts."""
        return not self.settings.policy.bounded

    @property
    def total(self) -> int:
        """Maximum number of rows: the budget, or `context_length` if the policy never evicts."""
        return self.context_length if self.unbounded else self.settings.budget

    @property
    def only_between_turns(self) -> bool:
        """Whether a turn and its reply may exceed the budget until the next user turn."""
        return self.settings.evict == "between-turns" and not self.unbounded

    @property
    def hard_bound(self) -> int:
        """Maximum number of rows in the cache at any time, even within a turn.

        It is the budget, or the context length if rows are evicted only between turns.
        """
        return max(self.total, self.context_length) if self.only_between_turns else self.total

    @property
    def reserve(self) -> int:
        """Number of rows of the budget that are set aside for recalled tokens; 0 without recall.

        If the setting `recall_n` is a number, this is always `full_reserve`. If it is `auto`, this
        is 0 until a token has been evicted and `full_reserve` rows are free; recalled rows count as
        free. `make_room_for_turn` frees these rows when a turn does not fit beside all tokens read
        so far.
        """
        recall, size = self.settings.recall, self.full_reserve
        is_fixed = recall is None or recall.n is not None
        has_evicted = self.policy_rows < self.ledger.seen  # also if all evicted rows are recalled
        if is_fixed or (has_evicted and self.policy_rows <= self.total - size):
            return size
        return 0

    @property
    def full_reserve(self) -> int:
        """Number of rows to reserve for recalled tokens when the budget can't hold all tokens."""
        recall = self.settings.recall
        if recall is None or self.unbounded:
            return 0
        # An automatic reserve leaves room for all pins, also for those that are not held now.
        at = self.ledger.pinned_positions if recall.n is None else self.ledger.held_positions
        room = self.total - self.sinks - self.pins(at)
        return most_recalled(usual_reserve(room) if recall.n is None else recall.n, room)

    @property
    def policy_budget(self) -> int:
        """Maximum number of rows, recalled rows not counted: the budget minus the reserve."""
        return self.total - self.reserve

    @property
    def policy_bound(self) -> int:
        """Maximum number of rows at any time, even within a turn, recalled rows not counted."""
        return self.hard_bound - self.reserve

    @property
    def policy_rows(self) -> int:
        """Number of rows in the cache now, without the rows that recall has restored."""
        return self.ledger.held_count - len(self.ledger.recalled)

    @property
    def policy_positions(self) -> Positions:
        """Stream positions [n], ascending, of the rows in the cache, except recalled rows."""
        held, recalled = self.ledger.held_positions, self.ledger.recalled
        return np.setdiff1d(held, recalled, assume_unique=True) if len(recalled) else held

    @property
    def sinks(self) -> int:
        """How many of the stream's first tokens always stay; 0 if the policy ignores sinks."""
        return self.settings.sinks if self.settings.policy.honours_sinks else 0

    @property
    def eviction_block(self) -> int:
        """Number of rows to evict at once when the cache is full while tokens are generated.

        It is small enough that all protected rows can stay.
        """
        return min(max(8, self.policy_budget // 16), self.most_protected())

    @property
    def chunk_size(self) -> int:
        """Number of ids for which room is made at once, before they are read.

        It is a quarter of `evictable`, but at most `most_protected`.
        """
        return max(1, min(self.evictable() // 4, self.most_protected()))

    def max_prefill(self, pinned: bool) -> int:
        """Maximum number of ids read in one forward pass: as many chunks as fit, at least one.

        The number has no influence on which tokens are evicted. If `pinned`, the ids become pins
        and are read one chunk at a time, because pins change the size of the next chunk.
        """
        size = self.chunk_size
        if pinned or self.compacts_at_anchors:
            return size
        free = min(self.policy_bound - self.policy_rows, _AT_ONCE)
        return size * max(1, free // size)

    def most_protected(self, at: Positions | None = None) -> int:
        """Maximum number of rows of the current round that are protected from eviction.

        It is half of the room for new tokens. This room is the policy's `newest_room`, computed
        from `evictable`. The argument `at` is the same as in `evictable`.
        """
        return self.settings.policy.newest_room(self.evictable(at)) // 2

    def evictable(self, at: Positions | None = None) -> int:
        """E: the number of rows that the policy decides about: budget minus sinks, pins, reserve.

        The pins are those among the rows in the cache or, if `at` is given, among the rows at these
        stream positions.
        """
        pins = self.pins(self.ledger.held_positions if at is None else at)
        return max(_LEAST, self.policy_budget - self.sinks - pins)

    def enough_for(self, tokens: int) -> int | None:
        """The smallest budget with which the policy decides about at least `tokens` rows.

        It is a power of two, or the context length if that is smaller; None if even the context
        length is not enough.
        """
        size = _LEAST
        while size < self.context_length:
            size = min(2 * size, self.context_length)
            if size - self.sinks - self.pins(self.ledger.held_positions) >= _LEAST:
                larger = replace(self, settings=replace(self.settings, budget=size))
                if larger.evictable() >= tokens:
                    return size
        return None

    def pins(self, at: Positions) -> int:
        """How many of the rows at stream positions `at` are pinned, not counting sinks.

        0 if the policy ignores pins.
        """
        return int((self.pinned(at) & (at >= self.sinks)).sum())

    def pinned(self, at: Positions) -> NDArray[np.bool_]:
        """Mask of the pinned rows at positions `at` [n]; all False if the policy ignores pins."""
        if not self.settings.policy.honours_pins:
            return np.zeros(len(at), bool)
        return (self.ledger.column("flags")[at] & Flag.PINNED).astype(bool)

    @property
    def most_pins(self) -> int | None:
        """How many rows may be pinned, not counting sinks; None if their number is not limited."""
        if self.unbounded or not self.settings.policy.honours_pins:
            return None
        return min(self.total // 2, self.total - self.sinks - _LEAST)

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether the policy evicts rows right after each anchor is read."""
        return self.settings.policy.compacts_at_anchors

    def end_at_anchor(self, flags: Sequence[int], start: int, end: int) -> int:
        """The index (exclusive) at which a chunk of ids that begins at index `start` must end.

        If the policy evicts rows after each anchor, and there is an anchor before `end`, the chunk
        must end right after the anchor. Otherwise it may end at `end`. `flags` has the flags of
        every id.
        """
        if self.compacts_at_anchors:
            return next((at + 1 for at in range(start, end) if flags[at] & Flag.ANCHOR), end)
        return end

    def visible_to_anchor(self) -> Tensor:
        """Numbers [k] of the rows in the cache to which the next anchor may attend.

        These are the rows of the anchor's own sequence (equation (4) of Anchor-based LLMs) and the
        sinks.
        """
        held = self.ledger.held_positions
        anchors = np.flatnonzero(self.ledger.column("flags")[held] & Flag.ANCHOR)
        begins = held[anchors[-1]] + 1 if len(anchors) else 0
        return torch.from_numpy(np.flatnonzero((held >= begins) | (held < self.sinks)))

    def check_pins(self, reachable: Positions, more: int) -> None:
        """Raise SettingError if there would be too many pins for the budget.

        The pins are those among the rows at positions `reachable`, and `more` new ones.
        """
        allowed = self.most_pins
        if allowed is None:
            return
        pins = self.pins(reachable)
        pins += more - min(more, max(0, self.sinks - self.ledger.seen))
        if pins > allowed:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {self.total} allows only {allowed}",
                hint="raise the budget, /unpin something, or set pin_system to false",
            )

    def view(self, at: Positions, round: int | None) -> HeldRows:
        """The rows at stream positions `at` [n] as the policy sees them, protected rows marked.

        Sinks and pins are protected. If the setting `protect` is on, the newest rows of the current
        round are protected, too, but at most `most_protected` rows. `round` is the number of the
        current round; if it is None, only sinks and pins are protected.
        """
        protected = (at < self.sinks) | self.pinned(at)
        if self.settings.protect and round is not None:
            current = self.ledger.column("round")[at] == round
            protected |= current & (at >= self.ledger.seen - self.most_protected(at))
        return self.ledger.view(at, sinks=self.sinks, protected=protected)

    def choose(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Let the policy choose which of the `rows` stay; returns their numbers [num_keep].

        The numbers are int64 and ascending. Raises SettingError if the policy returns numbers that
        are not valid, or leaves out a protected row.
        """
        chosen = self.settings.policy.keep(rows, num_keep)
        if not _is_choice(chosen, rows, num_keep):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} made an invalid choice of tokens",
                hint="`sirchat policies check` shows why; /policy NAME chooses another policy",
            )
        return chosen


def usual_reserve(room: int) -> int:
    """Number of rows that are reserved for recall if `recall_n` is `auto`.

    `room` is the number of rows of the budget that are neither sinks nor pins. This was measured
    with SmolLM2 and facts in 4,000 tokens of real talk. At any budget, a larger reserve found more
    facts, up to 400 rows or the three quarters of `room` that `most_recalled` allows. But where
    only 25 rows were left to the policy, text was harder to predict, by 0.06 nats a token.
    """
    return max(room // 4, min(3 * room // 4, room - _OWN_ROWS, _USUAL_RESERVE))


def most_recalled(n: int, room: int) -> int:
    """How many rows are reserved for recall if `n` are wanted: at most three quarters of `room`.

    `room` is the number of rows of the budget that are neither sinks nor pins. The last quarter is
    needed to read the conversation itself.
    """
    return max(0, min(n, 3 * room // 4, room - _LEAST))


def _is_choice(rows: Tensor, held: HeldRows, num_keep: int) -> bool:
    """Whether `rows` are `num_keep` ascending row numbers of `held`, with all protected rows."""
    if len(rows) != num_keep or not bool((rows.diff() > 0).all()):
        return False
    if num_keep and not (int(rows[0]) >= 0 and int(rows[-1]) < len(held)):
        return False
    return int(held.protected[rows].sum()) == int(held.protected.sum())
