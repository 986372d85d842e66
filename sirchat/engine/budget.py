"""The arithmetic of a budget: what sinks, pins and the reserve take of it.

A budget is sinks + pins + E + reserve: the policy decides on E rows, what is recalled has the
reserve, and the rest never leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.records import CacheSettings
from sirchat.errors import SettingError
from sirchat.memory.ledger import Flag, HeldRows, Ledger

Positions = NDArray[np.int64]

_LEAST = 8
"""Rows that sinks and pins must leave to the conversation."""


@dataclass(frozen=True, eq=False)
class Budget:
    """What the settings `settings` let a ledger's conversation hold.

    `context_length` is the budget where nothing is forgotten.
    """

    settings: CacheSettings
    ledger: Ledger
    context_length: int

    @property
    def unbounded(self) -> bool:
        """Whether nothing is ever forgotten."""
        return not self.settings.policy.bounded

    @property
    def budget(self) -> int:
        """Rows that may be held: the setting, or the context length when nothing is forgotten."""
        return self.context_length if self.unbounded else self.settings.budget

    @property
    def reserve(self) -> int:
        """Rows of the budget that are kept free for what is recalled."""
        recall = self.settings.recall
        if recall is None or self.unbounded:
            return 0
        pins = self.pins(self.ledger.held_positions)
        return most_recalled(recall.n, self.budget - self.sinks - pins)

    @property
    def policy_budget(self) -> int:
        """Rows that the policy may hold: the budget without the reserve."""
        return self.budget - self.reserve

    @property
    def policy_rows(self) -> int:
        """Held rows that are not in the reserve."""
        return self.ledger.held_count - len(self.ledger.recalled)

    @property
    def policy_positions(self) -> Positions:
        """Stream positions [n], ascending, of the held rows that are not in the reserve."""
        held, recalled = self.ledger.held_positions, self.ledger.recalled
        return np.setdiff1d(held, recalled, assume_unique=True) if len(recalled) else held

    @property
    def sinks(self) -> int:
        """First tokens of the stream that always stay, if the policy honours sinks."""
        return self.settings.sinks if self.settings.policy.honours_sinks else 0

    @property
    def eviction_block(self) -> int:
        """Rows freed at once while generating; never so many that protected rows would go."""
        return min(max(8, self.policy_budget // 16), self.evictable() // 2)

    def evictable(self, at: Positions | None = None) -> int:
        """E: the rows that neither sinks nor pins, of the held ones or those at `at`, take."""
        pins = self.pins(self.ledger.held_positions if at is None else at)
        return max(_LEAST, self.policy_budget - self.sinks - pins)

    def pins(self, at: Positions) -> int:
        """Pinned rows beyond the sinks among those at `at`, if the policy honours pins."""
        return int((self.pinned(at) & (at >= self.sinks)).sum())

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether the policy lets rows go behind each anchor."""
        return self.settings.policy.compacts_at_anchors

    def end_at_anchor(self, flags: Sequence[int], start: int, end: int) -> int:
        """Where a piece that begins at `start` ends: behind its first anchor, or at `end`."""
        if self.compacts_at_anchors:
            return next((at + 1 for at in range(start, end) if flags[at] & Flag.ANCHOR), end)
        return end

    def sequence(self) -> Tensor:
        """Rows [k] of the held view that an anchor read now may see: its sequence, and the sinks.

        Equation (4) of Anchor-based LLMs, and the sinks, which stand before all sequences.
        """
        held = self.ledger.held_positions
        anchors = np.flatnonzero(self.ledger.column("flags")[held] & Flag.ANCHOR)
        begins = held[anchors[-1]] + 1 if len(anchors) else 0
        return torch.from_numpy(np.flatnonzero((held >= begins) | (held < self.sinks)))

    def pinned(self, at: Positions) -> NDArray[np.bool_]:
        """Mask [n] of the rows at `at` that are pinned; none, if the policy honours no pins."""
        if not self.settings.policy.honours_pins:
            return np.zeros(len(at), bool)
        return (self.ledger.column("flags")[at] & Flag.PINNED).astype(bool)

    def check_pins(self, reachable: Positions, more: int) -> None:
        """Raise SettingError when the pins among `reachable` and `more` rows leave too little."""
        if self.unbounded or not self.settings.policy.honours_pins:
            return
        pins = self.pins(reachable)
        pins += more - min(more, max(0, self.sinks - self.ledger.seen))
        allowed = min(self.budget // 2, self.budget - self.sinks - _LEAST)
        if pins > allowed:
            raise SettingError(
                f"{pins} tokens are to be pinned, but budget {self.budget} allows {allowed}",
                hint="raise the budget, /unpin something, or set pin_system to false",
            )

    def view(self, at: Positions, round: int | None) -> HeldRows:
        """Rows at `at` [n] as the policy sees them, with what must stay.

        Of `round`, the one under way, the newest E/2 rows must, where the settings protect them.
        """
        protected = (at < self.sinks) | self.pinned(at)
        if self.settings.protect and round is not None:
            current = self.ledger.column("round")[at] == round
            protected |= current & (at >= self.ledger.seen - self.evictable(at) // 2)
        return self.ledger.view(at, sinks=self.sinks, protected=protected)

    def choose(self, rows: HeldRows, num_keep: int) -> Tensor:
        """The policy's choice among `rows`, checked: ascending int64 [num_keep].

        Raises SettingError for a policy that breaks its contract.
        """
        chosen = self.settings.policy.keep(rows, num_keep)
        if not _is_choice(chosen, rows, num_keep):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} breaks the contract of policies",
                hint="`sirchat policies check` says how; /policy chooses another",
            )
        return chosen


def most_recalled(n: int, budget_rules: int) -> int:
    """How many of n rows the reserve gets, of the `room` beside sinks and pins.

    At most three quarters: the conversation itself needs room to be read.
    """
    return max(0, min(n, 3 * budget_rules // 4, budget_rules - _LEAST))


def _is_choice(rows: Tensor, held: HeldRows, num_keep: int) -> bool:
    """Whether `rows` are `num_keep` ascending rows of the held ones, protected rows included."""
    if len(rows) != num_keep or not bool((rows.diff() > 0).all()):
        return False
    if num_keep and not (int(rows[0]) >= 0 and int(rows[-1]) < len(held)):
        return False
    return int(held.protected[rows].sum()) == int(held.protected.sum())
