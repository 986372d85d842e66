"""The archive: keys and values of evicted tokens, as first written, in RAM or on disk.

Tokens are appended to segments and looked up by stream position. A token that is restored to the
cache also stays in the archive, and is not stored again when it is evicted again. Over its limit,
the archive deletes whole segments, the one with the lowest mean score first.

What is on a GPU is copied in the background, while the next step is computed. Its places in a
segment are reserved at once, and written when the copy is finished, at the latest before anything
is read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from sirchat.memory.archive_folder import ArchiveFolder
from sirchat.memory.free_memory import trim_memory
from sirchat.memory.key_values import KeyValues, Positions, Transfer, Transfers

SEGMENT_ROWS = 512
_MOST_ARRIVING = 8  # unfinished transfers from a GPU


class Archive:
    """Keys and values of evicted tokens, looked up by stream position.

    `limit` is the maximum size in bytes, applied by `shrink`; None for no limit. Full segments are
    written to files in `folder`; None keeps them in RAM.
    """

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        self.limit = limit
        self.transfers = Transfers()
        self._files = SegmentFiles(folder)
        self._segments: dict[int, Segment] = {}  # by number; the last one gets more tokens
        self._count = 0  # of the segments made
        self.clear()

    @property
    def disk_error(self) -> str | None:
        """Says why a segment could not be written to disk; None without an error."""
        return self._files.error

    def close(self) -> None:
        """Remove everything, also the files on disk."""
        self.clear()
        self._files.close()

    def clear(self) -> None:
        """Remove everything."""
        for number in list(self._segments):
            self._drop(number)
        self._arriving: list[tuple[Transfer, list[tuple[int, int, int]]]] = []
        self._slots = np.full(1024, -1, np.int64)  # by position: segment x SEGMENT_ROWS + place

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(segment.nbytes for segment in self._segments.values())

    def bytes_by_device(self) -> Counter[str]:
        """Size in bytes in RAM (`cpu`) and in files (`disk`)."""
        sizes = Counter[str]()
        for segment in self._segments.values():
            sizes["disk" if self._files.has(segment) else "cpu"] += segment.nbytes
        return sizes

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def positions(self) -> Positions:
        """Stream positions of all archived tokens, ascending."""
        return np.flatnonzero(self._slots >= 0)

    def has(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n]: which of the stream `positions` [n] are archived."""
        in_range = positions < len(self._slots)
        stored = np.zeros(len(positions), bool)
        stored[in_range] = self._slots[positions[in_range]] >= 0
        return stored

    def added_since(self, segment: int) -> tuple[Positions, int]:
        """The positions of the tokens in the segments from this number on, and the last number."""
        last = max(0, self._count - 1)
        numbers = (number for number in range(segment, self._count) if number in self._segments)
        stored = [self._segments[number].stored for number in numbers]
        return np.concatenate([np.zeros(0, np.int64), *stored]), last

    @torch.inference_mode()
    def add(self, tokens: KeyValues) -> None:
        """Store keys and values, from any device; those that are archived already are skipped."""
        new = np.flatnonzero(~self.has(tokens.positions))
        if len(new) < len(tokens):
            tokens = tokens.take(new)
        if not len(tokens):
            return
        if (needed := int(tokens.positions.max()) + 1) > len(self._slots):
            grown = np.full(max(needed, 2 * len(self._slots)), -1, np.int64)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
        start, parts = 0, list[tuple[int, int, int]]()
        try:
            while start < len(tokens):
                number, segment = self._open(tokens.tensors)
                end = min(len(tokens), start + SEGMENT_ROWS - segment.used)
                places = segment.used + np.arange(end - start)
                self._slots[tokens.positions[start:end]] = number * SEGMENT_ROWS + places
                parts.append((number, segment.used, end - start))
                segment.reserve(tokens.positions[start:end], tokens.written_at[start:end])
                start = end
            self._arriving.append((self.transfers.to_host(tokens.tensors), parts))
        except BaseException:  # the places stay empty
            self._slots[tokens.positions] = -1
            raise
        while self._arriving and (
            self._arriving[0][0].is_done() or len(self._arriving) > _MOST_ARRIVING
        ):
            self._store_first_transfer()

    @torch.inference_mode()
    def fetch(self, positions: Positions, layer: int | None = None) -> KeyValues:
        """The archived tokens at stream `positions` [n], in this order; of one layer, if given.

        Raises LookupError if one is not archived.
        """
        if not self.has(positions).all():
            raise LookupError("the archive does not have all of the requested tokens")
        self._flush()
        order = np.argsort(self._slots[positions])
        slots = self._slots[positions[order]]
        numbers, starts = np.unique(slots // SEGMENT_ROWS, return_index=True)
        parts = list[list[Tensor]]()
        written_at = np.zeros(len(positions), np.int64)
        for number, start, end in zip(numbers, starts, [*starts[1:], len(slots)], strict=True):
            segment, places = self._segments[number], slots[start:end] % SEGMENT_ROWS
            written_at[order[start:end]] = segment.written_at[places]
            of_layer = slice(None) if layer is None else slice(2 * layer, 2 * layer + 2)
            chosen = torch.from_numpy(places)
            parts.append([tensor.index_select(1, chosen) for tensor in segment.tensors[of_layer]])
        tensors = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        if (np.diff(order) < 0).any():  # copies everything, so only where the order differs
            inverse = torch.from_numpy(np.argsort(order))
            tensors = [tensor.index_select(1, inverse) for tensor in tensors]
        return KeyValues(positions.copy(), written_at, tensors)

    def shrink(self, score: Callable[[Positions], NDArray[np.float64]]) -> Positions:
        """Delete segments until the size is within the limit; returns the positions deleted.

        `score` returns the scores [n] of the tokens at stream positions [n].
        """
        gone = list[Positions]()
        while self.limit is not None and self.nbytes > self.limit:
            stored = {number: segment.stored for number, segment in self._segments.items()}
            means = {n: float(score(at).mean()) if len(at) else -np.inf for n, at in stored.items()}
            lowest = min(means, key=means.__getitem__)
            gone.append(stored[lowest])
            self._slots[stored[lowest]] = -1
            self._drop(lowest)
        return np.concatenate(gone) if gone else np.zeros(0, np.int64)

    @torch.inference_mode()
    def remove(self, positions: Positions) -> None:
        """Remove the archived ones of these tokens; overwrite their keys and values with zeros."""
        self._flush()
        positions = positions[self.has(positions)]
        slots = self._slots[positions]
        for number in np.unique(slots // SEGMENT_ROWS).tolist():
            self._files.wait()  # a pending write would set the old tensors again
            segment = self._segments[number]
            was_full = segment.is_full
            segment.erase(slots[slots // SEGMENT_ROWS == number] % SEGMENT_ROWS)
            if was_full and not len(segment.stored):
                self._drop(number)
            elif was_full and not segment.is_full and number == self._count - 1:
                # It gets more tokens, which would not be in a file that is written meanwhile.
                self._files.drop(number)
            elif was_full:
                self._files.put(number, segment)
        self._slots[positions] = -1

    def reorder(self, order: Positions, rank: Positions) -> None:
        """Let the tokens stand in another order; see `Ledger.reorder`. No tensor moves."""
        self._flush()
        slots = np.full(max(1024, len(order)), -1, np.int64)
        known = order < len(self._slots)
        slots[: len(order)][known] = self._slots[order[known]]
        self._slots = slots
        for segment in self._segments.values():
            stored = segment.positions >= 0
            segment.positions[stored] = rank[segment.positions[stored]]

    def truncate(self, seen: int) -> None:
        """Remove all but the conversation's first `seen` tokens, as `remove` does."""
        stored = self.positions
        self.remove(stored[stored >= seen])

    def _open(self, like: list[Tensor]) -> tuple[int, Segment]:
        """The segment to which the next tokens are appended, with its number."""
        last = self._segments.get(self._count - 1)
        if last is None or last.is_full:
            last = self._segments[self._count] = Segment(like)
            self._count += 1
        return self._count - 1, last

    def _store_first_transfer(self) -> None:
        """Wait for the oldest unfinished copy from a GPU; write it to its reserved places."""
        transfer, parts = self._arriving.pop(0)
        tensors, start = transfer.take(), 0
        for number, at, count in parts:
            segment = self._segments.get(number)
            if segment is not None:  # it was not dropped meanwhile
                segment.put(at, [tensor[:, start : start + count] for tensor in tensors])
                if at + count == SEGMENT_ROWS:
                    self._files.put(number, segment)
            start += count

    def _flush(self) -> None:
        while self._arriving:
            self._store_first_transfer()

    def _drop(self, number: int) -> None:
        del self._segments[number]
        self._files.drop(number)


class Segment:
    """Room for the keys and values of `SEGMENT_ROWS` tokens, filled from the front.

    Its tensors have the heads, dimensions and dtypes of those of `like`, [H, n, D].
    """

    def __init__(self, like: list[Tensor]) -> None:
        self.tensors = [
            torch.zeros((tensor.shape[0], SEGMENT_ROWS, tensor.shape[2]), dtype=tensor.dtype)
            for tensor in like
        ]
        self.positions = np.full(SEGMENT_ROWS, -1, np.int64)  # -1: no token, or erased
        self.written_at = np.zeros(SEGMENT_ROWS, np.int64)
        self.used = 0
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_full(self) -> bool:
        """Whether no more tokens fit."""
        return self.used == SEGMENT_ROWS

    @property
    def stored(self) -> Positions:
        """The stream positions of its tokens."""
        return self.positions[self.positions >= 0]

    def reserve(self, positions: Positions, written_at: NDArray[np.int64]) -> None:
        """Reserve places, which must be free, for tokens whose tensors `put` writes later."""
        end = self.used + len(positions)
        self.positions[self.used : end] = positions
        self.written_at[self.used : end] = written_at
        self.used = end

    def put(self, start: int, tensors: list[Tensor]) -> None:
        """Write keys and values [H, k, D] into the places from `start` on."""
        for stored, given in zip(self.tensors, tensors, strict=True):
            stored[:, start : start + given.shape[1]].copy_(given)

    def erase(self, places: NDArray[np.int64]) -> None:
        """Overwrite the keys and values at these places [k] with zeros."""
        self.positions[places] = -1
        self.tensors = [tensor.clone() for tensor in self.tensors]  # a memory map is read-only
        for tensor in self.tensors:
            tensor[:, torch.from_numpy(places)] = 0
        while self.used and self.positions[self.used - 1] < 0:
            self.used -= 1  # erased places at the end are free again


class SegmentFiles:
    """A private folder with one file for each full segment; without a folder nothing is written.

    A background thread writes the files. They are read through memory maps, so that only the pages
    in use take memory. `error` says why a segment could not be written; None without an error.
    """

    def __init__(self, folder: Path | None) -> None:
        self.error: str | None = None
        self._folder = ArchiveFolder(folder) if folder is not None else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._pending: list[Future[None]] = []

    def has(self, segment: Segment) -> bool:
        """Whether the segment is in a file, or soon will be."""
        return self._folder is not None and segment.is_full

    def put(self, number: int, segment: Segment) -> None:
        """Write a full segment; its tensors then become memory maps of the file."""
        if self._folder is not None:
            self._pending = [future for future in self._pending if not future.done()]
            self._pending.append(self._writer.submit(self._write, self._folder, number, segment))

    def drop(self, number: int) -> None:
        """Delete a segment's file, after all pending writes."""
        if self._folder is not None:
            self._pending.append(self._writer.submit(_delete, _path(self._folder, number)))

    def wait(self) -> None:
        """Wait until all pending writes are done."""
        for future in self._pending:
            future.result()
        self._pending = []

    def close(self) -> None:
        """Delete the folder now; otherwise it is deleted when the program ends."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        if self._folder is not None:
            self._folder.remove()

    @torch.inference_mode()
    def _write(self, folder: ArchiveFolder, number: int, segment: Segment) -> None:
        path = _path(folder, number)
        new = path.with_suffix(".safetensors.new")
        try:
            folder.make()
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            save_file({str(n): tensor for n, tensor in enumerate(segment.tensors)}, new)
            os.chmod(new, 0o600)
            os.replace(new, path)
            stored = load_file(path)
            segment.tensors = [stored[str(n)] for n in range(len(stored))]
            trim_memory()  # else what was in RAM leaves gaps in the heap
        except Exception as error:  # safetensors raises its own errors for a full disk
            self.error = f"{getattr(error, 'strerror', None) or error}: {folder.path}"
            with suppress(OSError):
                new.unlink(missing_ok=True)  # a part of a segment would fill the disk for good


def _path(folder: ArchiveFolder, number: int) -> Path:
    return folder.path / f"{number:06}.safetensors"


def _delete(path: Path) -> None:
    with suppress(OSError):  # the folder is deleted when the program ends
        path.unlink(missing_ok=True)
