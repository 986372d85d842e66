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

from sirchat.engine.records import Memory
from sirchat.errors import SettingError
from sirchat.memory.ledger import Flag, Held, Ledger

Positions = NDArray[np.int64]

_LEAST = 8
"""Rows that sinks and pins must leave to the conversation."""


@dataclass(frozen=True, eq=False)
class Room:
    """What the settings `memory` let a ledger's conversation hold.

    `context_length` is the budget where nothing is forgotten.
    """

    memory: Memory
    ledger: Ledger
    context_length: int

    @property
    def grows(self) -> bool:
        """Whether nothing is ever forgotten."""
        return not self.memory.policy.bounded

    @property
    def budget(self) -> int:
        """Rows that may be held: the setting, or the context length when nothing is forgotten."""
        return self.context_length if self.grows else self.memory.budget

    @property
    def reserve(self) -> int:
        """Rows of the budget that are kept free for what is recalled."""
        recall = self.memory.recall
        if recall is None or self.grows:
            return 0
        pins = self.pins(self.ledger.held_positions)
        return most_recalled(recall.n, self.budget - self.sinks - pins)

    @property
    def base(self) -> int:
        """Rows that the policy may hold: the budget without the reserve."""
        return self.budget - self.reserve

    @property
    def own(self) -> int:
        """Held rows that are not in the reserve."""
        return self.ledger.held_count - len(self.ledger.recalled)

    @property
    def own_positions(self) -> Positions:
        """Stream positions [n], ascending, of the held rows that are not in the reserve."""
        held, recalled = self.ledger.held_positions, self.ledger.recalled
        return np.setdiff1d(held, recalled, assume_unique=True) if len(recalled) else held

    @property
    def sinks(self) -> int:
        """First tokens of the stream that always stay, if the policy honours sinks."""
        return self.memory.sinks if self.memory.policy.honours_sinks else 0

    @property
    def block(self) -> int:
        """Rows freed at once while generating; never so many that protected rows would go."""
        return min(max(8, self.base // 16), self.free() // 2)

    def free(self, at: Positions | None = None) -> int:
        """E: the rows that neither sinks nor pins, of the held ones or those at `at`, take."""
        pins = self.pins(self.ledger.held_positions if at is None else at)
        return max(_LEAST, self.base - self.sinks - pins)

    def pins(self, at: Positions) -> int:
        """Pinned rows beyond the sinks among those at `at`, if the policy honours pins."""
        return int((self.pinned(at) & (at >= self.sinks)).sum())

    @property
    def gathers(self) -> bool:
        """Whether the policy lets rows go behind each anchor."""
        return self.memory.policy.gathers

    def behind_anchor(self, flags: Sequence[int], start: int, end: int) -> int:
        """Where a piece that begins at `start` ends: behind its first anchor, or at `end`."""
        if self.gathers:
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
        if not self.memory.policy.honours_pins:
            return np.zeros(len(at), bool)
        return (self.ledger.column("flags")[at] & Flag.PINNED).astype(bool)

    def check_pins(self, reachable: Positions, more: int) -> None:
        """Raise SettingError when the pins among `reachable` and `more` rows leave too little."""
        if self.grows or not self.memory.policy.honours_pins:
            return
        pins = self.pins(reachable)
        pins += more - min(more, max(0, self.sinks - self.ledger.seen))
        allowed = min(self.budget // 2, self.budget - self.sinks - _LEAST)
        if pins > allowed:
            raise SettingError(
                f"{pins} tokens are to be pinned, but budget {self.budget} allows {allowed}",
                hint="raise the budget, /unpin something, or set pin_system to false",
            )

    def view(self, at: Positions, round: int | None) -> Held:
        """Rows at `at` [n] as the policy sees them, with what must stay.

        Of `round`, the one under way, the newest E/2 rows must, where the settings protect them.
        """
        protected = (at < self.sinks) | self.pinned(at)
        if self.memory.protect and round is not None:
            current = self.ledger.column("round")[at] == round
            protected |= current & (at >= self.ledger.seen - self.free(at) // 2)
        return self.ledger.view(at, sinks=self.sinks, protected=protected)

    def choose(self, rows: Held, num_keep: int) -> Tensor:
        """The policy's choice among `rows`, checked: ascending int64 [num_keep].

        Raises SettingError for a policy that breaks its contract.
        """
        chosen = self.memory.policy.keep(rows, num_keep)
        if not _is_choice(chosen, rows, num_keep):
            raise SettingError(
                f"policy {type(self.memory.policy).__name__} breaks the contract of policies",
                hint="`sirchat policies check` says how; /policy chooses another",
            )
        return chosen


def most_recalled(n: int, room: int) -> int:
    """How many of n rows the reserve gets, of the `room` beside sinks and pins.

    At most three quarters: the conversation itself needs room to be read.
    """
    return max(0, min(n, 3 * room // 4, room - _LEAST))


def _is_choice(rows: Tensor, held: Held, num_keep: int) -> bool:
    """Whether `rows` are `num_keep` ascending rows of the held ones, protected rows included."""
    if len(rows) != num_keep or not bool((rows.diff() > 0).all()):
        return False
    if num_keep and not (int(rows[0]) >= 0 and int(rows[-1]) < len(held)):
        return False
    return int(held.protected[rows].sum()) == int(held.protected.sum())
