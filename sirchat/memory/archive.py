"""The archive: keys and values of evicted tokens, as first written, in RAM or on disk.

A row is the keys and values of one token in all layers. Rows are appended to segments, blocks of a
fixed number of rows, and are looked up by stream position. A row that is restored to the cache also
stays in the archive, so it is not stored a second time when it is evicted again. When the archive
exceeds its limit, it deletes whole segments, the one with the lowest mean score first.

Rows on a GPU are copied while the next step is computed; they have their place at once, and are put
there when they have arrived, at the latest when rows are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.index import Index
from sirchat.memory.segments import SEGMENT_ROWS, Positions, Rows, Segment, SegmentFiles
from sirchat.memory.transfers import Transfer, Transfers

_MOST_ARRIVING = 8  # transfers from a GPU at a time


class Archive:
    """Keys and values of evicted tokens, one row per token, looked up by stream position.

    Args:
        limit: maximum size in bytes, applied by `shrink`; None for no limit.
        folder: where full segments (blocks of rows) are written; None keeps them in RAM.

    Attributes:
        index: search index over the archived rows; None if none was built. Rows removed from
            the archive are removed from the index, too.
    """

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        self.limit = limit
        self._files = SegmentFiles(folder) if folder is not None else None
        self._segments: list[Segment | None] = []
        self._arriving: list[tuple[Transfer, list[tuple[int, int, int]]]] = []
        self.transfers = Transfers()
        self._nbytes = 0
        self.clear()

    @property
    def disk_error(self) -> str | None:
        """Why the disk can't be written to; None if it can."""
        return self._files.error if self._files is not None else None

    def close(self) -> None:
        """Remove every row, and delete the files on disk."""
        self.clear()
        if self._files is not None:
            self._files.close()

    def clear(self) -> None:
        """Remove every row."""
        for number in range(len(self._segments)):
            self._drop(number)
        self._segments, self._arriving = [], []
        self._slots = np.full(1024, -1, np.int64)  # by position: segment x SEGMENT_ROWS + row
        self.index: Index | None = None

    @property
    def nbytes(self) -> int:
        """Size of all archived keys and values, in bytes."""
        return self._nbytes

    def bytes_by_device(self) -> Counter[str]:
        """The same in memory (`cpu`) and on `disk`, where a folder's full segments are."""
        sizes = Counter[str]()
        for one in self._segments:
            if one is not None:
                is_written = self._files is not None and one.is_full
                sizes["disk" if is_written else "cpu"] += one.nbytes
        return sizes

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def positions(self) -> Positions:
        """Stream positions of all archived rows, ascending."""
        return np.flatnonzero(self._slots >= 0)

    def has(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n]: True for each of the stream `positions` [n] whose row is archived."""
        in_range = positions < len(self._slots)
        stored = np.zeros(len(positions), bool)
        stored[in_range] = self._slots[positions[in_range]] >= 0
        return stored

    @torch.inference_mode()
    def add(self, rows: Rows) -> None:
        """Store rows, which may be on any device; rows that are archived already are skipped."""
        new = np.flatnonzero(~self.has(rows.positions))
        if len(new) < len(rows):
            rows = rows.take(new)
        if not len(rows):
            return
        self._grow(int(rows.positions.max()) + 1)
        start, parts = 0, list[tuple[int, int, int]]()
        while start < len(rows):
            segment, number = self._open(rows.tensors)
            end = min(len(rows), start + SEGMENT_ROWS - segment.used)
            self._slots[rows.positions[start:end]] = (
                number * SEGMENT_ROWS + segment.used + np.arange(end - start)
            )
            parts.append((number, segment.used, end - start))
            segment.reserve(rows.positions[start:end], rows.written_at[start:end])
            start = end
        self._arriving.append((self.transfers.to_host(rows.tensors), parts))
        while self._arriving and (
            self._arriving[0][0].is_done() or len(self._arriving) > _MOST_ARRIVING
        ):
            self._put_first()

    def _put_first(self) -> None:
        """Put the rows that have been on their way for the longest time into their segments."""
        transfer, parts = self._arriving.pop(0)
        tensors, start = transfer.take(), 0
        for number, at, count in parts:
            segment = self._segments[number]
            if segment is not None:  # it was not dropped meanwhile
                segment.put(at, [one[:, start : start + count] for one in tensors])
                if at + count == SEGMENT_ROWS and self._files is not None:
                    self._files.put(number, segment)
            start += count

    def settle(self) -> None:
        """Wait for the rows that are on their way from a GPU."""
        while self._arriving:
            self._put_first()

    @torch.inference_mode()
    def fetch(self, positions: Positions, layer: int | None = None, *, values: bool = True) -> Rows:
        """The rows at stream `positions` [n], in the same order: all layers, or only `layer`.

        If `values` is False, only keys are read, in half the time; the value tensors have width 0.
        Raises LookupError if one of the rows is not archived.
        """
        if not self.has(positions).all():
            raise LookupError("the archive does not have all of the requested rows")
        self.settle()
        order = np.argsort(self._slots[positions])
        slots = self._slots[positions[order]]
        numbers, starts = np.unique(slots // SEGMENT_ROWS, return_index=True)
        parts: list[list[Tensor]] = []
        written_at = np.zeros(len(positions), np.int64)
        for number, start, end in zip(numbers, starts, [*starts[1:], len(slots)], strict=True):
            segment = self._segments[number]
            if segment is None:
                raise LookupError("the archive does not have all of the requested rows")
            stored = segment.tensors
            if layer is not None:
                stored = stored[2 * layer : 2 * layer + 2]
            within = slots[start:end] % SEGMENT_ROWS
            written_at[order[start:end]] = segment.written_at[within]
            rows = torch.from_numpy(within)
            parts.append([tensor.index_select(1, rows) for tensor in stored[:: 1 if values else 2]])
        tensors = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        if (np.diff(order) < 0).any():  # copies everything, so only where the order differs
            inverse = torch.from_numpy(np.argsort(order))
            tensors = [tensor.index_select(1, inverse) for tensor in tensors]
        if not values:
            tensors = [tensor for key in tensors for tensor in (key, key[:, :, :0])]
        return Rows(positions.copy(), written_at, tensors)

    def blocks(self, wanted: Positions) -> Iterator[Rows]:
        """Yield the archived rows at the stream positions `wanted`, one segment's at a time.

        Positions that are not archived are skipped. If all rows of a segment are wanted, they are
        views of its tensors; otherwise copies.
        """
        self.settle()
        is_wanted = np.zeros(len(self._slots) + 1, bool)  # the last entry: erased rows, at -1
        is_wanted[wanted[wanted < len(self._slots)]] = True
        for segment in self._segments:
            if segment is None or not segment.used:
                continue
            chosen = np.flatnonzero(is_wanted[segment.positions[: segment.used]])
            rows = Rows(
                segment.positions[: segment.used],
                segment.written_at[: segment.used],
                [tensor[:, : segment.used] for tensor in segment.tensors],
            )
            if len(chosen):
                yield rows if len(chosen) == segment.used else rows.take(chosen)

    def shrink(self, score: Callable[[Positions], NDArray[np.float64]]) -> Positions:
        """Delete the segments with the lowest mean score until the archive is within its limit.

        `score` returns the scores [n] of the rows at given stream positions [n]. Returns the stream
        positions [k] of the deleted rows.
        """
        gone: list[Positions] = []
        while self.limit is not None and self.nbytes > self.limit:
            numbers = [n for n, segment in enumerate(self._segments) if segment is not None]
            lowest = min(numbers, key=lambda n: self._mean_score(n, score))
            gone.append(self._positions_in(lowest))
            self._slots[gone[-1]] = -1
            self._drop(lowest)
            if self.index is not None:
                self.index.remove(gone[-1])
        return np.concatenate(gone) if gone else np.zeros(0, np.int64)

    def remove(self, positions: Positions) -> None:
        """Remove these rows, and overwrite their keys and values with zeros.

        The search index, which was built from these rows, is deleted. Positions that are not
        archived are skipped.
        """
        self.index = None
        self._erase(positions[self.has(positions)])

    @torch.inference_mode()
    def _erase(self, positions: Positions) -> None:
        self.settle()
        slots = self._slots[positions]
        for number in np.unique(slots // SEGMENT_ROWS):
            segment = self._segments[number]
            rows = slots[slots // SEGMENT_ROWS == number] % SEGMENT_ROWS
            if segment is not None:
                if self._files is not None:
                    self._files.wait()  # a pending write would set the old tensors again
                was_full = segment.is_full
                segment.erase(rows)
                if segment.is_empty and was_full:
                    self._drop(int(number))
                elif was_full and self._files is not None:
                    self._files.put(int(number), segment)
        self._slots[positions] = -1

    def truncate(self, seen: int) -> None:
        """Remove every row from stream position `seen` on; overwrite its keys and values."""
        stored = self.positions
        stored = stored[stored >= seen]
        self._erase(stored)
        if self.index is not None:
            self.index.remove(stored)

    def _drop(self, number: int) -> None:
        segment, self._segments[number] = self._segments[number], None
        self._nbytes -= segment.nbytes if segment is not None else 0
        if self._files is not None:
            self._files.drop(number)

    def _mean_score(self, number: int, score: Callable[[Positions], NDArray[np.float64]]) -> float:
        stored = self._positions_in(number)
        return float(score(stored).mean()) if len(stored) else -np.inf

    def _positions_in(self, number: int) -> Positions:
        """Stream positions of the rows in segment `number`; empty if it was deleted."""
        segment = self._segments[number]
        if segment is None:
            return np.zeros(0, np.int64)
        return segment.positions[segment.positions >= 0]

    def _open(self, like: list[Tensor]) -> tuple[Segment, int]:
        """The segment to append rows to, and its number.

        If the last segment is full, this is a new one for tensors shaped like `like`.
        """
        last = self._segments[-1] if self._segments else None
        if last is None or last.is_full:
            last = Segment(like)
            self._segments.append(last)
            self._nbytes += last.nbytes
        return last, len(self._segments) - 1

    def _grow(self, rows: int) -> None:
        """Extend the array of slots, one per stream position, to at least `rows` entries.

        If it is too short, its length at least doubles.
        """
        if rows > len(self._slots):
            grown = np.full(max(rows, 2 * len(self._slots)), -1, np.int64)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
