"""The vectors that a model's encoder computed for the newest tokens, until sentences pool them."""

from __future__ import annotations

import torch
from torch import Tensor

from sirchat.memory.key_values import Positions


class TokenVectors:
    """A vector [D] for each of a run of tokens that ends with the newest token.

    Vectors are kept only if they are `wanted`. Vectors of erased tokens are NaN.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._start = self._count = 0  # stream position of the first one, and how many there are
        self._rows = torch.zeros(0, 0)

    def append(self, start: int, numbers: Tensor) -> None:
        """Add the vectors [m, D] of tokens from stream position `start` on.

        Earlier vectors are dropped if they do not end right before `start`.
        """
        count = self._count
        if start != self._start + count or numbers.shape[1] != self._rows.shape[1]:
            self._start, count = start, 0
        needed = count + len(numbers)
        if needed > len(self._rows) or not count:
            grown = torch.empty(max(needed, 2 * count, 64), numbers.shape[1])
            if count:
                grown[:count] = self._rows[:count]
            self._rows = grown
        self._rows[count:needed] = numbers
        self._count = needed

    def mean(self, start: int, end: int) -> Tensor | None:
        """The mean [D] of the vectors from `start` to `end` - 1; None if any is missing or NaN."""
        offset = start - self._start
        if not 0 <= offset < offset + end - start <= self._count:
            return None
        mean = self._rows[offset : offset + end - start].mean(0)
        return None if mean.isnan().any() else mean

    def drop_before(self, position: int) -> None:
        """Drop the vectors of the tokens before this stream position."""
        dropped = min(max(0, position - self._start), self._count)
        self._rows = self._rows[dropped : self._count].clone()
        self._start, self._count = self._start + dropped, self._count - dropped

    def truncate(self, seen: int) -> None:
        """Drop the vectors of all but the first `seen` tokens of the stream."""
        self._count = min(self._count, max(0, seen - self._start))
        self._rows[self._count :] = torch.nan  # what was erased stays nowhere

    def erase(self, positions: Positions) -> None:
        offset = positions - self._start
        self._rows[torch.from_numpy(offset[(offset >= 0) & (offset < self._count)])] = torch.nan
