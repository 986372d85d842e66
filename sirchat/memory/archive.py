"""The archive: keys and values of evicted tokens, as first written, in RAM or on disk.

A row is the keys and values of one token in all layers. Rows are appended to segments, blocks of a
fixed number of rows, and are looked up by stream position: the index of their token among all
tokens of the conversation. A row that is restored to the cache also stays in the archive, so it is
not stored a second time when it is evicted again. When the archive exceeds its limit, it deletes
whole segments, the one with the lowest mean score first.

Rows on a GPU are copied in the background, while the next step is computed. Slots in a segment are
reserved for the rows at once. The rows are written to these slots when the copy is finished, at the
latest before any archived row is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.key_value_stats import Block, key_value_stats
from sirchat.memory.key_values import KeyValues, Positions, merged
from sirchat.memory.ledger import KeyValueStat
from sirchat.memory.segments import SEGMENT_ROWS, Segment, SegmentFiles
from sirchat.memory.transfers import Transfer, Transfers

if TYPE_CHECKING:  # that module imports this one
    from sirchat.memory.cache import BoundedCache

_MOST_ARRIVING = 8  # maximum number of unfinished transfers from a GPU


class Archive:
    """Stores keys and values of evicted tokens, one row per token, looked up by stream position.

    Args:
        limit: maximum size in bytes, applied by `shrink`; None for no limit.
        folder: where full segments (blocks of rows) are written; None keeps them in RAM.

    Attributes:
        parts: number of processes that each store an equal part of every row; `nbytes` counts
            all parts.
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
        """Message that says why a segment could not be written to disk; None without an error."""
        return self._files.error if self._files is not None else None

    def close(self) -> None:
        """Remove every row from the archive, and delete its files on disk."""
        self.clear()
        if self._files is not None:
            self._files.close()

    def clear(self) -> None:
        """Remove every row from the archive."""
        for number in range(len(self._segments)):
            self._drop(number)
        self._segments, self._arriving = [], []
        self._slots = np.full(1024, -1, np.int64)  # by position: segment x SEGMENT_ROWS + row

    @property
    def nbytes(self) -> int:
        """Size of all archived keys and values, in bytes."""
        return self._nbytes

    def bytes_by_device(self) -> Counter[str]:
        """Size in bytes of the archive's segments: key `cpu` for RAM, key `disk` for files."""
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
    def add(self, rows: KeyValues) -> None:
        """Store `rows` of keys and values, which may be on any device.

        Rows that the archive already has are skipped.
        """
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
        """Wait for the oldest unfinished copy from a GPU; write its rows to their segments."""
        transfer, parts = self._arriving.pop(0)
        tensors, start = transfer.take(), 0
        for number, at, count in parts:
            segment = self._segments[number]
            if segment is not None:  # it was not dropped meanwhile
                segment.put(at, [one[:, start : start + count] for one in tensors])
                if at + count == SEGMENT_ROWS and self._files is not None:
                    self._files.put(number, segment)
            start += count

    def flush(self) -> None:
        """Wait for all unfinished copies from a GPU, and write their rows to the segments."""
        while self._arriving:
            self._put_first()

    def add_held(self, cache: BoundedCache, rows: Tensor, positions: Positions) -> None:
        """Store a copy of the rows numbered `rows` [k] in the KV cache `cache`.

        `positions` [k] are the stream positions of these rows.
        """
        self.add(cache.first_written(rows, positions))

    def add_all(self, other: Archive) -> None:
        """Copy all rows of the archive `other` to this one."""
        if len(other):
            self.add(other.fetch(other.positions))

    def fill(
        self, cache: BoundedCache, rows: Tensor, held: Positions, positions: Positions
    ) -> None:
        """Make the KV cache `cache` hold exactly the rows at the stream `positions` [n].

        Some of these rows are in the cache already: they have the row numbers `rows` [k] and the
        stream positions `held` [k]. The other rows are copied from the archive.
        """
        filling = self.fetch(np.setdiff1d(positions, held, assume_unique=True))
        if len(held):
            filling = merged(cache.first_written(rows, held), filling)
        cache.replace(filling)

    def insert_into(self, cache: BoundedCache, start: int, layers: Sequence[Positions]) -> None:
        """Copy archived rows into the KV cache `cache`, before its row number `start`.

        Layer i gets the rows at stream positions `layers[i]`. Raises LookupError, changing nothing,
        if one of the rows is not archived.
        """
        cache.insert(start, [self.fetch(at, layer) for layer, at in enumerate(layers)])

    def statistics(
        self,
        cache: BoundedCache,
        held: Positions,
        positions: Positions,
        wanted: Collection[KeyValueStat],
    ) -> dict[KeyValueStat, NDArray[np.float64]]:
        """Compute statistics of the keys and values of tokens in the cache or the archive.

        `wanted` are names of statistics; returns an array [n] for each name. `positions` [n] are
        the tokens' stream positions, ascending. `held` are the stream positions of all rows in
        `cache`. A token that is neither in the cache nor in the archive gets NaN.
        """
        blocks = partial(self._ranked_blocks, cache, held, positions)
        return key_value_stats(wanted, len(positions), blocks, partial(blocks, as_read=True))

    def _ranked_blocks(
        self, cache: BoundedCache, held: Positions, positions: Positions, *, as_read: bool = False
    ) -> Iterator[Block]:
        """Yield the rows at stream `positions` in blocks, from the cache and from the archive.

        Keys are as first written. If `as_read` is true, they are rotated as attention reads them;
        and if some of the rows are not in the cache, each key is rotated as if the cache held
        exactly the rows at `positions`.
        """
        here = np.flatnonzero(np.isin(positions, held, assume_unique=True))
        slots = torch.from_numpy(np.searchsorted(held, positions[here]))
        if as_read and len(here) == len(positions):
            yield Block(here, cache.as_read(slots))
            return
        first = [cache.first_written(slots, positions[here])] if len(here) else []
        archived = self.blocks(np.setdiff1d(positions, held, assume_unique=True))
        for rows in chain(first, archived):
            numbers = np.searchsorted(positions, rows.positions)
            if as_read:
                rows = cache.rotated(rows, torch.from_numpy(numbers))
            yield Block(numbers, rows.tensors)

    @torch.inference_mode()
    def fetch(self, positions: Positions, layer: int | None = None) -> KeyValues:
        """Read the archived rows at stream `positions` [n]; returns them in the same order.

        The rows have the keys and values of all layers, or of the layer number `layer` alone.
        Raises LookupError if one of the rows is not archived.
        """
        if not self.has(positions).all():
            raise LookupError("the archive does not have all of the requested rows")
        self.flush()
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
            parts.append([tensor.index_select(1, rows) for tensor in stored])
        tensors = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        if (np.diff(order) < 0).any():  # copies everything, so only where the order differs
            inverse = torch.from_numpy(np.argsort(order))
            tensors = [tensor.index_select(1, inverse) for tensor in tensors]
        return KeyValues(positions.copy(), written_at, tensors)

    def blocks(self, wanted: Positions) -> Iterator[KeyValues]:
        """Yield the archived rows at the stream positions `wanted`, segment by segment.

        Positions that are not archived are skipped. If all rows of a segment are wanted, the
        yielded tensors are views of the segment's tensors; otherwise they are copies.
        """
        self.flush()
        is_wanted = np.zeros(len(self._slots) + 1, bool)  # the last entry: erased rows, at -1
        is_wanted[wanted[wanted < len(self._slots)]] = True
        for segment in self._segments:
            if segment is None or not segment.used:
                continue
            chosen = np.flatnonzero(is_wanted[segment.positions[: segment.used]])
            rows = KeyValues(
                segment.positions[: segment.used],
                segment.written_at[: segment.used],
                [tensor[:, : segment.used] for tensor in segment.tensors],
            )
            if len(chosen):
                yield rows if len(chosen) == segment.used else rows.take(chosen)

    def shrink(self, score: Callable[[Positions], NDArray[np.float64]]) -> Positions:
        """Delete segments (blocks of rows) until the archive is within its limit of bytes.

        The segment with the lowest mean score is deleted first. `score` is a function that returns
        the scores [n] of the rows at given stream positions [n]. Returns the stream positions [k]
        of the deleted rows.
        """
        gone: list[Positions] = []
        while self.limit is not None and self.nbytes > self.limit:
            numbers = [n for n, segment in enumerate(self._segments) if segment is not None]
            gone.append(self.drop(min(numbers, key=lambda n: self._mean_score(n, score))))
        return np.concatenate(gone) if gone else np.zeros(0, np.int64)

    def drop(self, number: int) -> Positions:
        """Delete the segment (block of rows) with this number.

        Returns the stream positions [k] of its rows.
        """
        gone = self._positions_in(number)
        self._slots[gone] = -1
        self._drop(number)
        return gone

    def remove(self, positions: Positions) -> None:
        """Remove the rows at these stream positions; overwrite their keys and values with zeros.

        Positions that are not archived are skipped.
        """
        self._erase(positions[self.has(positions)])

    @torch.inference_mode()
    def _erase(self, positions: Positions) -> None:
        self.flush()
        slots = self._slots[positions]
        for number in np.unique(slots // SEGMENT_ROWS):
            segment = self._segments[number]
            rows = slots[slots // SEGMENT_ROWS == number] % SEGMENT_ROWS
            if segment is not None:
                if self._files is not None:
                    self._files.wait()  # a pending write would set the old tensors again
                was_full = segment.is_full
                segment.erase(rows)
                gets_more = number == len(self._segments) - 1 and not segment.is_full
                if segment.is_empty and was_full:
                    self._drop(int(number))
                elif was_full and self._files is not None:
                    # While a file is written, rows must not be added: they would not be in it.
                    if gets_more:
                        self._files.drop(int(number))
                    else:
                        self._files.put(int(number), segment)
        self._slots[positions] = -1

    def truncate(self, seen: int) -> None:
        """Remove the rows of all but the conversation's first `seen` tokens.

        The keys and values of these rows are overwritten with zeros.
        """
        stored = self.positions
        self._erase(stored[stored >= seen])

    def _drop(self, number: int) -> None:
        segment, self._segments[number] = self._segments[number], None
        self._nbytes -= segment.nbytes if segment is not None else 0
        if self._files is not None:
            self._files.drop(number)

    def _mean_score(self, number: int, score: Callable[[Positions], NDArray[np.float64]]) -> float:
        stored = self._positions_in(number)
        return float(score(stored).mean()) if len(stored) else -np.inf

    def _positions_in(self, number: int) -> Positions:
        """Stream positions of the rows in the segment with this number.

        Returns an empty array if the segment was deleted.
        """
        segment = self._segments[number]
        if segment is None:
            return np.zeros(0, np.int64)
        return segment.positions[segment.positions >= 0]

    def _open(self, like: list[Tensor]) -> tuple[Segment, int]:
        """Find the segment (block of rows) to which the next rows are appended.

        If the last segment is full, a new one is made for rows shaped like the tensors `like`.
        Returns the segment and its number.
        """
        last = self._segments[-1] if self._segments else None
        if last is None or last.is_full:
            last = Segment(like)
            self._segments.append(last)
            self._nbytes += last.nbytes
        return last, len(self._segments) - 1

    def _grow(self, rows: int) -> None:
        """Make the lookup table, with one entry per stream position, at least `rows` entries long.

        A table that is too short becomes at least twice as long.
        """
        if rows > len(self._slots):
            grown = np.full(max(rows, 2 * len(self._slots)), -1, np.int64)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
