"""What left the cache and can come back: keys and values as first written, in RAM or on disk.

Rows are appended in segments of fixed size and found by their stream position. A row that returns
to the cache stays here too, and is not stored a second time when it leaves again. Over its limit
the archive lets go of whole segments, those of the lowest scores first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.index import Index
from sirchat.memory.segments import SEGMENT_ROWS, Positions, Rows, Segment, SegmentFiles


class Archive:
    """Rows by stream position, up to `limit` bytes; full segments go to `folder`, if given.

    Attributes:
        index: finds rows by what they hold, where somebody made one; what leaves here leaves it.
    """

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        self.limit = limit
        self._shelf = SegmentFiles(folder) if folder is not None else None
        self._segments: list[Segment | None] = []
        self.clear()

    @property
    def trouble(self) -> str | None:
        """Why the disk can't be written, once it can't."""
        return self._shelf.trouble if self._shelf is not None else None

    def close(self) -> None:
        """Store nothing, and delete what is on disk."""
        self.clear()
        if self._shelf is not None:
            self._shelf.close()

    def clear(self) -> None:
        """Store nothing."""
        for number in range(len(self._segments)):
            self._drop(number)
        self._segments = []
        self._places = np.full(1024, -1, np.int64)  # by position: segment x SEGMENT_ROWS + row
        self.index: Index | None = None

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values, in bytes."""
        return sum(one.nbytes for one in self._segments if one is not None)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def positions(self) -> Positions:
        """Stream positions of all rows, ascending."""
        return np.flatnonzero(self._places >= 0)

    def has(self, positions: Positions) -> NDArray[np.bool_]:
        """Which of these stream positions [n] are stored."""
        known = positions < len(self._places)
        found = np.zeros(len(positions), bool)
        found[known] = self._places[positions[known]] >= 0
        return found

    @torch.inference_mode()
    def add(self, rows: Rows) -> None:
        """Store rows, wherever their tensors are; those that are stored already are skipped."""
        new = np.flatnonzero(~self.has(rows.positions))
        if len(new) < len(rows):
            rows = rows.take(new)
        if not len(rows):
            return
        self._reserve(int(rows.positions.max()) + 1)
        start = 0
        while start < len(rows):
            segment, number = self._open(rows.tensors)
            end = min(len(rows), start + SEGMENT_ROWS - segment.used)
            self._places[rows.positions[start:end]] = (
                number * SEGMENT_ROWS + segment.used + np.arange(end - start)
            )
            segment.put(rows.between(start, end))
            start = end
            if segment.is_full and self._shelf is not None:
                self._shelf.put(number, segment)

    @torch.inference_mode()
    def fetch(self, positions: Positions, layer: int | None = None, *, values: bool = True) -> Rows:
        """The rows at these stream positions [n], in this order; of one layer alone, if given.

        Without `values`, theirs are of width 0: keys alone come in half the time.
        Raises LookupError when one of them is not stored.
        """
        if not self.has(positions).all():
            raise LookupError("the archive does not have all of these rows")
        order = np.argsort(self._places[positions])
        places = self._places[positions[order]]
        numbers, starts = np.unique(places // SEGMENT_ROWS, return_index=True)
        parts: list[list[Tensor]] = []
        written_at = np.zeros(len(positions), np.int64)
        for number, start, end in zip(numbers, starts, [*starts[1:], len(places)], strict=True):
            segment = self._segments[number]
            if segment is None:
                raise LookupError("the archive does not have all of these rows")
            stored = segment.tensors
            if layer is not None:
                stored = stored[2 * layer : 2 * layer + 2]
            within = places[start:end] % SEGMENT_ROWS
            written_at[order[start:end]] = segment.written_at[within]
            rows = torch.from_numpy(within)
            parts.append([one.index_select(1, rows) for one in stored[:: 1 if values else 2]])
        tensors = [torch.cat(one, dim=1) for one in zip(*parts, strict=True)]
        if (np.diff(order) < 0).any():  # a copy of all, so not in vain
            back = torch.from_numpy(np.argsort(order))
            tensors = [one.index_select(1, back) for one in tensors]
        if not values:
            tensors = [one for key in tensors for one in (key, key[:, :, :0])]
        return Rows(positions.copy(), written_at, tensors)

    def blocks(self, wanted: Positions) -> Iterator[Rows]:
        """Those of the stream positions `wanted` that are stored, segment by segment: views."""
        is_wanted = np.zeros(len(self._places) + 1, bool)  # the last one is that of erased rows, -1
        is_wanted[wanted[wanted < len(self._places)]] = True
        for segment in self._segments:
            if segment is None or not segment.used:
                continue
            mine = np.flatnonzero(is_wanted[segment.positions[: segment.used]])
            rows = Rows(
                segment.positions[: segment.used],
                segment.written_at[: segment.used],
                [one[:, : segment.used] for one in segment.tensors],
            )
            if len(mine):
                yield rows if len(mine) == segment.used else rows.take(mine)

    def shrink(self, score: Callable[[Positions], NDArray[np.float64]]) -> Positions:
        """Let go of the segments with the lowest mean score until the limit is met.

        Returns the positions [k] of the rows that are stored no more.
        """
        gone: list[Positions] = []
        while self.limit is not None and self.nbytes > self.limit:
            full = [n for n, one in enumerate(self._segments) if one is not None]
            lowest = min(full, key=lambda n: self._mean(n, score))
            gone.append(self._stored(lowest))
            self._places[gone[-1]] = -1
            self._drop(lowest)
            if self.index is not None:
                self.index.remove(gone[-1])
        return np.concatenate(gone) if gone else np.zeros(0, np.int64)

    def remove(self, positions: Positions) -> None:
        """Forget these rows: their keys and values are overwritten, and no index knows them."""
        self.index = None
        self._erase(positions[self.has(positions)])

    @torch.inference_mode()
    def _erase(self, positions: Positions) -> None:
        places = self._places[positions]
        for number in np.unique(places // SEGMENT_ROWS):
            segment = self._segments[number]
            rows = places[places // SEGMENT_ROWS == number] % SEGMENT_ROWS
            if segment is not None:
                if self._shelf is not None:
                    self._shelf.wait()  # a segment under way would come back as it was
                was_full = segment.is_full
                segment.erase(rows)
                if segment.is_empty and was_full:
                    self._drop(int(number))
                elif was_full and self._shelf is not None:
                    self._shelf.put(int(number), segment)
        self._places[positions] = -1

    def truncate(self, seen: int) -> None:
        """Forget every row from stream position `seen` on."""
        stored = self.positions
        stored = stored[stored >= seen]
        self._erase(stored)
        if self.index is not None:
            self.index.remove(stored)

    def _drop(self, number: int) -> None:
        self._segments[number] = None
        if self._shelf is not None:
            self._shelf.drop(number)

    def _mean(self, number: int, score: Callable[[Positions], NDArray[np.float64]]) -> float:
        stored = self._stored(number)
        return float(score(stored).mean()) if len(stored) else -np.inf

    def _stored(self, number: int) -> Positions:
        """The positions of a segment's rows."""
        segment = self._segments[number]
        if segment is None:
            return np.zeros(0, np.int64)
        return segment.positions[segment.positions >= 0]

    def _open(self, like: list[Tensor]) -> tuple[Segment, int]:
        """The segment that is being filled, and its number."""
        last = self._segments[-1] if self._segments else None
        if last is None or last.is_full:
            last = Segment(like)
            self._segments.append(last)
        return last, len(self._segments) - 1

    def _reserve(self, rows: int) -> None:
        """Grow by doubling."""
        if rows > len(self._places):
            grown = np.full(max(rows, 2 * len(self._places)), -1, np.int64)
            grown[: len(self._places)] = self._places
            self._places = grown
