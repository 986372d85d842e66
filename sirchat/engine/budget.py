"""The arithmetic of a budget: how many rows sinks, pins, the policy and recall may hold.

budget = sinks + pins + E + reserve. The policy decides about E rows, recalled rows fill the
reserve, sinks and pins are never evicted. The budget is a hard bound, unless rows are evicted only
between turns: then a turn and its reply may exceed it, up to the model's context length.
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
"""Fewest rows that sinks and pins must leave to the policy."""

_USUAL_RESERVE, _OWN_ROWS = 400, 64

_AT_ONCE = 1024
"""Maximum number of ids read in one pass of several chunks; Ctrl-C is handled between passes."""


@dataclass(frozen=True, eq=False)
class Budget:
    """The limits that `settings` put on the held rows of one conversation.

    `context_length` is the budget of a policy that never evicts, and the hard bound of settings
    that evict only between turns.
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
        """Maximum number of rows held: `budget`, or the context length if nothing is evicted."""
        return self.context_length if self.unbounded else self.settings.budget

    @property
    def only_between_turns(self) -> bool:
        """Whether a turn and its reply may exceed the budget until the next user turn."""
        return self.settings.evict == "between-turns" and not self.unbounded

    @property
    def hard_bound(self) -> int:
        """Maximum number of rows held at any time, even within a turn: budget or context length."""
        return max(self.total, self.context_length) if self.only_between_turns else self.total

    @property
    def reserve(self) -> int:
        """Rows of the budget that are kept free for recall."""
        recall = self.settings.recall
        if recall is None or self.unbounded:
            return 0
        pins = self.pins(self.ledger.held_positions)
        room = self.total - self.sinks - pins
        return most_recalled(usual_reserve(room) if recall.n is None else recall.n, room)

    @property
    def policy_budget(self) -> int:
        """Maximum number of rows held outside the reserve."""
        return self.total - self.reserve

    @property
    def policy_bound(self) -> int:
        """Maximum number of rows held outside the reserve at any time, also within a turn."""
        return self.hard_bound - self.reserve

    @property
    def policy_rows(self) -> int:
        """Number of held rows outside the reserve."""
        return self.ledger.held_count - len(self.ledger.recalled)

    @property
    def policy_positions(self) -> Positions:
        """Stream positions [n], ascending, of the held rows outside the reserve."""
        held, recalled = self.ledger.held_positions, self.ledger.recalled
        return np.setdiff1d(held, recalled, assume_unique=True) if len(recalled) else held

    @property
    def sinks(self) -> int:
        """Number of first tokens that always stay; 0 if the policy ignores sinks."""
        return self.settings.sinks if self.settings.policy.honours_sinks else 0

    @property
    def eviction_block(self) -> int:
        """Rows to evict at once while generating; few enough that protected rows can stay."""
        return min(max(8, self.policy_budget // 16), self.most_protected())

    @property
    def chunk_size(self) -> int:
        """Ids for which room is made at once: `evictable` / 4, at most `most_protected`."""
        return max(1, min(self.evictable() // 4, self.most_protected()))

    def max_prefill(self, pinned: bool) -> int:
        """Maximum number of ids read in one pass: as many chunks as fit, but at least one.

        This number does not change what is evicted. Pinned ids are read one chunk at a time,
        because they change the size of the next chunk.
        """
        size = self.chunk_size
        if pinned or self.compacts_at_anchors:
            return size
        free = min(self.policy_bound - self.policy_rows, _AT_ONCE)
        return size * max(1, free // size)

    def most_protected(self, at: Positions | None = None) -> int:
        """Maximum number of protected rows in the current round: half of the room for new tokens.

        That room is `evictable`, or less by the policy's `newest_room`. `at` as in `evictable`.
        """
        return self.settings.policy.newest_room(self.evictable(at)) // 2

    def evictable(self, at: Positions | None = None) -> int:
        """E: rows of the policy's budget that are neither sinks nor pins.

        Pins are counted among the held rows, or among the rows at positions `at` if given.
        """
        pins = self.pins(self.ledger.held_positions if at is None else at)
        return max(_LEAST, self.policy_budget - self.sinks - pins)

    def enough_for(self, tokens: int) -> int | None:
        """The least budget, a power of two, with which `evictable` is at least `tokens`.

        At most the context length; None if that is not enough.
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
        """Number of pinned rows at positions `at`, without sinks; 0 if the policy ignores pins."""
        return int((self.pinned(at) & (at >= self.sinks)).sum())

    def pinned(self, at: Positions) -> NDArray[np.bool_]:
        """Mask of the pinned rows at positions `at` [n]; all False if the policy ignores pins."""
        if not self.settings.policy.honours_pins:
            return np.zeros(len(at), bool)
        return (self.ledger.column("flags")[at] & Flag.PINNED).astype(bool)

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether the policy evicts rows right after each anchor is read."""
        return self.settings.policy.compacts_at_anchors

    def end_at_anchor(self, flags: Sequence[int], start: int, end: int) -> int:
        """End of the chunk that begins at `start`: just after its first anchor, at most `end`."""
        if self.compacts_at_anchors:
            return next((at + 1 for at in range(start, end) if flags[at] & Flag.ANCHOR), end)
        return end

    def visible_to_anchor(self) -> Tensor:
        """Numbers [k] of held rows that the next anchor may see: its own sequence and the sinks.

        Equation (4) of Anchor-based LLMs, extended by the sinks, which precede all sequences.
        """
        held = self.ledger.held_positions
        anchors = np.flatnonzero(self.ledger.column("flags")[held] & Flag.ANCHOR)
        begins = held[anchors[-1]] + 1 if len(anchors) else 0
        return torch.from_numpy(np.flatnonzero((held >= begins) | (held < self.sinks)))

    def check_pins(self, reachable: Positions, more: int) -> None:
        """Raise SettingError if pins at `reachable` and `more` new pins leave too few rows."""
        if self.unbounded or not self.settings.policy.honours_pins:
            return
        pins = self.pins(reachable)
        pins += more - min(more, max(0, self.sinks - self.ledger.seen))
        allowed = min(self.total // 2, self.total - self.sinks - _LEAST)
        if pins > allowed:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {self.total} allows only {allowed}",
                hint="raise the budget, /unpin something, or set pin_system to false",
            )

    def view(self, at: Positions, round: int | None) -> HeldRows:
        """Rows at positions `at` [n] as the policy sees them, with the protected ones marked.

        Sinks and pins are protected, and, if the settings say so, the newest rows of the current
        round `round`, at most `most_protected`. If `round` is None, no round is protected.
        """
        protected = (at < self.sinks) | self.pinned(at)
        if self.settings.protect and round is not None:
            current = self.ledger.column("round")[at] == round
            protected |= current & (at >= self.ledger.seen - self.most_protected(at))
        return self.ledger.view(at, sinks=self.sinks, protected=protected)

    def choose(self, rows: HeldRows, num_keep: int) -> Tensor:
        """The policy's choice among `rows`, checked: row numbers [num_keep], int64, ascending.

        Raises SettingError for a policy that breaks its contract.
        """
        chosen = self.settings.policy.keep(rows, num_keep)
        if not _is_choice(chosen, rows, num_keep):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} made an invalid choice of tokens",
                hint="`sirchat policies check` shows why; /policy NAME chooses another policy",
            )
        return chosen


def usual_reserve(room: int) -> int:
    """Number of rows that are reserved for recall if none is set; `room` as in `most_recalled`.

    On SmolLM2 and facts in 4,000 tokens of real talk, more rows found more facts at any budget, up
    to the three quarters that `most_recalled` allows; above 400, no more. But text was harder to
    predict, by 0.06 nats a token, where only 25 rows were left to the policy.
    """
    return max(room // 4, min(3 * room // 4, room - _OWN_ROWS, _USUAL_RESERVE))


def most_recalled(n: int, room: int) -> int:
    """Size of the reserve for n recalled rows; `room` is the budget without sinks and pins.

    At most three quarters of `room`, because the conversation itself needs room to be read.
    """
    return max(0, min(n, 3 * room // 4, room - _LEAST))


def _is_choice(rows: Tensor, held: HeldRows, num_keep: int) -> bool:
    """Whether `rows` are `num_keep` ascending row numbers of `held`, with all protected rows."""
    if len(rows) != num_keep or not bool((rows.diff() > 0).all()):
        return False
    if num_keep and not (int(rows[0]) >= 0 and int(rows[-1]) < len(held)):
        return False
    return int(held.protected[rows].sum()) == int(held.protected.sum())
