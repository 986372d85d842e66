"""The attention that rows received while their round was read a second time.

Of each row the highest weight that any query of the second reading gave it, as a mean over heads
and layers (KVzip, arXiv:2505.23416, section 3, whose own score is per head). It is known once the
round has ended, and never changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Floats = NDArray[np.float64]


class RepeatAttention:
    """One number for each row of the stream; 0 for rows that were not read a second time."""

    def __init__(self) -> None:
        self._highest = np.zeros(0)

    def set(self, positions: Positions, highest: Floats) -> None:
        """Set that of the rows at `positions` [n], ascending."""
        rows = int(positions[-1]) + 1 if len(positions) else 0
        if rows > len(self._highest):
            more = max(rows, 2 * len(self._highest)) - len(self._highest)
            self._highest = np.concatenate([self._highest, np.zeros(more)])
        self._highest[positions] = highest

    def of(self, positions: Positions) -> Floats:
        """That of the rows at `positions` [n]."""
        known, out = positions < len(self._highest), np.zeros(len(positions))
        out[known] = self._highest[positions[known]]
        return out

    def truncate(self, seen: int) -> None:
        """Delete that of rows from position `seen` on, which have never been read."""
        self._highest[seen:] = 0

    def erase(self, positions: Positions) -> None:
        """Delete that of these rows."""
        self._highest[positions[positions < len(self._highest)]] = 0
