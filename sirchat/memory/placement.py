"""Where the tokens of a conversation are, as one value. `KeyValueStore.place` carries it out.

What `place` has moved is told by records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sirchat.memory.key_values import Positions


def _none() -> Positions:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Placement:
    """Which tokens the cache holds, or is to hold, as ascending stream positions.

    Between two rounds, only `held` is in use. The others are what recall does for the current
    round.
    """

    held: Positions  # [n]
    recalled: Positions = field(default_factory=_none)  # those of `held` that recall has restored
    aside: Positions = field(default_factory=_none)  # archived until the round is complete
    # Those of `held` that recall wants, in the order in which they leave if room is needed.
    wanted: Positions = field(default_factory=_none)

    @property
    def has_recall(self) -> bool:
        """Whether recall has moved tokens for this round."""
        return any(map(len, (self.recalled, self.aside, self.wanted)))

    @property
    def held_without_recalled(self) -> Positions:
        """The held tokens that recall did not restore."""
        if not len(self.recalled):
            return self.held
        return np.setdiff1d(self.held, self.recalled, assume_unique=True)

    @property
    def policy_positions(self) -> Positions:
        """The policy's tokens: held ones that recall did not restore, and those set aside."""
        held = self.held_without_recalled
        return np.union1d(held, self.aside) if len(self.aside) else held

    def without(self, positions: Positions) -> Placement:
        each = (self.held, self.recalled, self.aside, self.wanted)
        return Placement(*(at[~np.isin(at, positions)] for at in each))


@dataclass(frozen=True)
class EvictedRows:
    """Record: the tokens at stream `positions` were evicted; `resident` of `seen` are held now."""

    positions: Positions
    resident: int
    seen: int


@dataclass(frozen=True)
class RestoredRows:
    """Record: the tokens at stream `positions` were restored; `resident` of `seen` are held now."""

    positions: Positions
    resident: int
    seen: int


Moves = list[EvictedRows | RestoredRows]
