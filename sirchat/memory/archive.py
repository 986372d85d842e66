"""The archive: keys and values of evicted tokens, as first written, in RAM or on disk.

Tokens are appended to segments and looked up by stream position. A restored token stays in the
archive, and is not stored again when it is evicted again. An archive over its limit stores its
oldest segments in 8 bits a number, then in 4 bits, and then deletes them. Tokens that were restored
meanwhile keep their bits for now, and count among the newest of their tier.

Keys and values on a GPU are copied in the background: the archive's thread writes them to places
in a segment that are reserved at once. Who reads the archive waits for it.
"""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from sirchat.memory.free_memory import trim_memory
from sirchat.memory.key_values import (
    EXACT,
    LOWER_TIER,
    NOT_STORED,
    KeyValues,
    LostTokensError,
    Positions,
    Tiers,
    Transfer,
    Transfers,
    dequantized,
    quantized,
)
from sirchat.paths import make_private_dir

SEGMENT_ROWS = 512
_MAX_UNFINISHED = 8  # unfinished transfers from a GPU
_LIMIT_DIVISOR = 8  # a full archive has an eighth of its limit exact, and an eighth in 8 bits
_MAX_RESTORATIONS = 3  # times that a token goes back to the newest of its tier, at most
_LOCK_SUFFIX = ".lock"
_STALE_LOCK_SECONDS = 24 * 3600  # seconds after which a lock without a folder is removed


class Archive:
    """Keys and values of evicted tokens, looked up by stream position.

    `limit` is the maximum size in bytes, applied by `shrink`; None for no limit. Full segments are
    written to files in `folder`; None keeps them in RAM.
    """

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        self.limit = limit
        self.transfers = Transfers()
        self._files = SegmentFiles(folder)
        self._segments: dict[int, Segment] = {}  # by number, the oldest first
        tiers = EXACT, *LOWER_TIER.values()
        self._numbers_by_tier = {bits: dict[int, None]() for bits in tiers}
        self._bytes_by_tier = Counter[int]()  # of each tier in bytes, by its bits
        self._segment_count = 0  # of the segments made
        self._centres = list[Tensor]()  # see `Tiers`; empty until a token goes down a tier
        self._next_encoded: tuple[int, Future[list[Tensor]]] | None = None  # the next to go down
        self._next_tensors: Future[list[Tensor]] | None = None  # of the next segment of exact rows
        # By position: segment x SEGMENT_ROWS + place; the fewest bits that its numbers had, also
        # while the cache alone has the token; restored so many times.
        self._addresses = np.full(1024, -1, np.int64)
        self._bits, self._restored = np.zeros(1024, np.uint8), np.zeros(1024, np.uint8)
        self.clear()

    @property
    def disk_error(self) -> str | None:
        """Why a segment could not be written to disk; None without an error."""
        return self._files.error

    def close(self) -> None:
        """Remove everything, also the files on disk."""
        self.clear()
        self._files.close()

    def clear(self) -> None:
        """Remove all tokens. The bits of each token stay known until `forget`."""
        for number in list(self._segments):
            self._drop(number)
        self._unfinished: list[tuple[Future[Any] | None, list[_Part]]] = []
        self._open_numbers = dict[int, int]()  # by tier: the segment that gets more
        self._addresses[:] = -1

    @property
    def nbytes(self) -> int:
        return self._bytes_by_tier.total()

    @property
    def is_over_limit(self) -> bool:
        return self.limit is not None and self.nbytes > self.limit

    def tiers(self, is_nowhere: NDArray[np.bool_]) -> Tiers | None:
        """How many bits each token is stored in, for a saved chat; None if all were always exact.

        `is_nowhere` [seen] marks the tokens that are neither held nor archived.
        """
        if not self._centres:
            return None
        bits = np.where(is_nowhere, NOT_STORED, self.bits(np.arange(len(is_nowhere))))
        return Tiers(bits.astype(np.uint8), list(self._centres))

    def restore_tiers(self, tiers: Tiers) -> None:
        """Let the empty archive store each token that is added in its saved tier."""
        count, self._centres = len(tiers.bits), list(tiers.centres)
        self._grow(count)
        self._bits[:count] = np.where(tiers.bits == NOT_STORED, EXACT, tiers.bits)

    def tier_sizes(self) -> dict[int, tuple[int, int]]:
        """Each tier's number of tokens and size in bytes, by the bits of the tier."""
        sizes = dict[int, tuple[int, int]]()
        for bits, numbers in self._numbers_by_tier.items():
            if numbers:
                count = sum(len(self._segments[number].stored) for number in numbers)
                sizes[bits] = count, self._bytes_by_tier[bits]
        return sizes

    def bits(self, positions: Positions) -> NDArray[np.uint8]:
        """The bits [n] to which each token's numbers were rounded, held or not; EXACT if never."""
        bits = np.zeros(len(positions), np.uint8)
        in_range = positions < len(self._bits)
        bits[in_range] = self._bits[positions[in_range]]
        return bits

    def note_restored(self, positions: Positions) -> None:
        """Let archived tokens that were restored to the cache stay longer in their tier."""
        more = self._restored[positions] + np.uint8(1)
        self._restored[positions] = np.minimum(more, _MAX_RESTORATIONS)

    def bytes_by_device(self) -> Counter[str]:
        """Size in bytes in RAM (`cpu`), with the segment made ahead, and in files (`disk`)."""
        sizes = Counter[str]()
        for segment in self._segments.values():
            sizes["disk" if segment.has_file else "cpu"] += segment.nbytes
        if (ahead := self._next_tensors) and ahead.done() and not ahead.exception():
            sizes["cpu"] += sum(tensor.nbytes for tensor in ahead.result())
        return sizes

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def positions(self) -> Positions:
        return np.flatnonzero(self._addresses >= 0)

    def has(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n]: which of the stream `positions` [n] are archived."""
        in_range = positions < len(self._addresses)
        stored = np.zeros(len(positions), bool)
        stored[in_range] = self._addresses[positions[in_range]] >= 0
        return stored

    @torch.inference_mode()
    def add(self, tokens: KeyValues) -> None:
        """Store keys and values from any device; skip tokens that are archived already."""
        new = np.flatnonzero(~self.has(tokens.positions))
        if len(new) < len(tokens):
            tokens = tokens.take(new)
        self._grow(int(tokens.positions.max(initial=0)) + 1)
        bits = self._bits[tokens.positions]
        for tier in np.unique(bits).tolist():
            subset = tokens if (bits == tier).all() else tokens.take(np.flatnonzero(bits == tier))
            if tier != EXACT:
                codes = quantized(subset.to("cpu").tensors, self._centres, EXACT, tier)
                subset = replace(subset, tensors=codes, block=None)
            self._append(subset, tier)

    def _append(self, tokens: KeyValues, bits: int) -> None:
        """Append tokens, whose tensors are already stored in `bits`, to the tier's segments."""
        start, parts, before = 0, list[_Part](), self._addresses[tokens.positions]
        if not len(tokens):
            return
        try:
            while start < len(tokens):
                number, segment = self._open_segment(tokens.tensors, bits)
                end = min(len(tokens), start + SEGMENT_ROWS - segment.used)
                places = segment.used + np.arange(end - start)
                self._addresses[tokens.positions[start:end]] = number * SEGMENT_ROWS + places
                parts.append((number, segment, segment.used, end - start))
                segment.reserve(tokens.positions[start:end], tokens.written_at[start:end])
                start = end
                if bits == EXACT and segment.used > SEGMENT_ROWS // 2 and not self._next_tensors:
                    self._next_tensors = self._files.run(partial(_touched_zeros, segment.tensors))
            transfer = self.transfers.to_host(tokens.tensors, tokens.block)
            store = partial(_store, transfer, parts)
            # On the CPU nothing else is done meanwhile.
            stored = self._files.run(store) if transfer.ends else store()
            self._unfinished.append((stored, parts))
        except BaseException:  # the places stay empty
            self._addresses[tokens.positions] = before
            for _, segment, at, count in parts:
                segment.positions[at : at + count] = -1
            raise
        while len(self._unfinished) > _MAX_UNFINISHED:
            self._finish_first_transfer()
        while self._unfinished and ((stored := self._unfinished[0][0]) is None or stored.done()):
            self._finish_first_transfer()

    @torch.inference_mode()
    def fetch(self, positions: Positions, layer: int | None = None) -> KeyValues:
        """The archived tokens at stream `positions` [n], in this order; of one layer, if given.

        Raises LostTokensError if a token is not archived.
        """
        if not self.has(positions).all():
            raise LostTokensError("the archive does not have all of the requested tokens")
        self._flush()
        order = np.argsort(self._addresses[positions])
        slots = self._addresses[positions[order]]
        numbers, starts = np.unique(slots // SEGMENT_ROWS, return_index=True)
        parts = list[list[Tensor]]()
        written_at = np.zeros(len(positions), np.int64)
        for number, start, end in zip(numbers, starts, [*starts[1:], len(slots)], strict=True):
            segment, places = self._segments[number], slots[start:end] % SEGMENT_ROWS
            written_at[order[start:end]] = segment.written_at[places]
            of_layer = slice(None) if layer is None else slice(2 * layer, 2 * layer + 2)
            part = segment.rows(places, segment.tensors[of_layer]).tensors
            parts.append(dequantized(part, self._centres[of_layer], segment.bits))
        tensors = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        if (np.diff(order) < 0).any():  # copies everything, so only where the order differs
            inverse = torch.from_numpy(np.argsort(order))
            tensors = [tensor.index_select(1, inverse) for tensor in tensors]
        return KeyValues(positions.copy(), written_at, tensors)

    @torch.inference_mode()
    def shrink(self, held: Positions, mark_not_stored: Callable[[Positions], None]) -> None:
        """Store old tokens in fewer bits, or delete them, until the size is within the limit.

        Copies of `held` tokens are deleted at once, because an eviction stores them again.
        `mark_not_stored` gets the positions of all other deleted tokens, also before an error.
        """
        while self.is_over_limit:
            mark_not_stored(self._demote(self._next_to_demote(), held))
        last = self._segments.get(self._open_numbers.get(EXACT, -1))
        if self.limit is not None and last and self.nbytes + last.nbytes > self.limit:
            number = self._next_to_demote()
            is_arriving = any(number == part[0] for _, parts in self._unfinished for part in parts)
            if self._segments[number].is_full and not is_arriving:
                self._encode(number)  # so that nobody waits for it

    def _demote(self, number: int, held: Positions) -> Positions:
        """Move a segment's tokens to the tier below; returns the positions of deleted tokens."""
        self._flush()
        segment, ahead = self._segments[number], self._encode(number)
        places = np.flatnonzero(segment.positions >= 0)
        places = places[~np.isin(segment.positions[places], held)]
        is_used = self._restored[segment.positions[places]] > 0
        again = segment.positions[places[is_used]]
        moves = [(places[is_used], segment.tensors, segment.bits)]
        if ahead is not None:
            self._next_encoded = None  # after an error, the next call encodes again
            moves.append((places[~is_used], ahead.result(), LOWER_TIER[segment.bits]))
        if self._open_numbers.get(segment.bits) == number:
            del self._open_numbers[segment.bits]
        for part, tensors, bits in moves:  # after an error, each token is in one segment
            rows = segment.rows(part, tensors)
            self._append(rows, bits)
            self._bits[rows.positions] = bits
            segment.positions[part] = -1
        self._restored[again] -= 1
        deleted = np.setdiff1d(segment.stored, held)
        self._addresses[segment.stored] = -1
        self._drop(number)
        self.forget(deleted)
        return deleted

    def _next_to_demote(self) -> int:
        """Number of the oldest segment in the first tier above its share, or in the lowest tier."""
        share = (self.limit or 0) / _LIMIT_DIVISOR
        for bits in LOWER_TIER:
            numbers = self._numbers_by_tier[bits]
            if len(numbers) > 1 and self._bytes_by_tier[bits] > share:
                return next(iter(numbers))
        return next(one for each in reversed(self._numbers_by_tier.values()) for one in each)

    def _encode(self, number: int) -> Future[list[Tensor]] | None:
        """Encode a segment for the tier below, in the archive's thread; None in the lowest tier."""
        segment = self._segments[number]
        if segment.bits not in LOWER_TIER:
            return None
        if not self._centres:
            rows = segment.rows(np.flatnonzero(segment.positions >= 0), segment.tensors)
            # A mean of few tokens would tell what they were after they are erased.
            share = float(2 * len(rows) >= SEGMENT_ROWS)
            self._centres = [
                (share * one.float().mean(1, keepdim=True)).to(one.dtype) for one in rows.tensors
            ]
        if not self._next_encoded or self._next_encoded[0] != number:
            given = list(segment.tensors), self._centres, segment.bits, LOWER_TIER[segment.bits]
            self._next_encoded = number, self._files.run(partial(quantized, *given))
        return self._next_encoded[1]

    @torch.inference_mode()
    def remove(self, positions: Positions) -> None:
        """Remove the archived tokens among these; overwrite their keys and values with zeros."""
        self._flush()
        positions = positions[self.has(positions)]
        slots = self._addresses[positions]
        for number in np.unique(slots // SEGMENT_ROWS).tolist():
            self._files.wait()  # a pending write would set the old tensors again
            self._next_encoded = None
            segment = self._segments[number]
            is_open = number == self._open_numbers.get(segment.bits)
            segment.erase(slots[slots // SEGMENT_ROWS == number] % SEGMENT_ROWS, is_open)
            if not len(segment.stored):
                self._drop(number)
            elif segment.has_file and not segment.is_full:
                # It gets more tokens, which would not be in a file that is written meanwhile.
                self._files.drop(number)
                segment.has_file = False
            elif segment.has_file:
                self._files.put(number, segment)
        self._addresses[positions] = -1
        self.forget(positions)

    def reorder(self, order: Positions, rank: Positions) -> None:
        """Give the tokens new positions, see `Ledger.reorder`; no tensor moves."""
        self._flush()
        self._grow(int(order.max(initial=0)) + 1)
        arrays: list[NDArray[Any]] = [self._addresses, self._bits, self._restored]
        for array, empty in zip(arrays, (-1, EXACT, 0), strict=True):
            array[: len(order)], array[len(order) :] = array[order], empty
        for segment in self._segments.values():
            stored = segment.positions >= 0
            segment.positions[stored] = rank[segment.positions[stored]]

    def forget(self, positions: Positions) -> None:
        """Forget the rounding of tokens that are stored nowhere: they are exact if read again."""
        in_range = positions[positions < len(self._bits)]
        self._bits[in_range] = self._restored[in_range] = 0

    def truncate(self, seen: int) -> None:
        """Remove all but the conversation's first `seen` tokens, as `remove` does."""
        self.remove(seen + np.flatnonzero(self._addresses[seen:] >= 0))
        self._bits[seen:] = self._restored[seen:] = 0

    def copy_from(self, other: Archive, with_rows: bool = True) -> None:
        """Copy another archive's records of each token and, `with_rows`, its keys and values."""
        other._flush()
        self._addresses = np.full(len(other._addresses), -1, np.int64)
        self._bits, self._restored = other._bits.copy(), other._restored.copy()
        self._centres = list(other._centres)
        for segment in other._segments.values() if with_rows else ():
            stored = np.flatnonzero(segment.positions >= 0)
            self._append(segment.rows(stored, segment.tensors), segment.bits)

    def _grow(self, count: int) -> None:
        """Enlarge the records of tokens to at least `count` positions."""
        if count > (before := len(self._addresses)):
            more = 0, max(count, 2 * before) - before
            self._addresses = np.pad(self._addresses, more, constant_values=-1)
            self._bits, self._restored = np.pad(self._bits, more), np.pad(self._restored, more)

    def _open_segment(self, like: list[Tensor], bits: int) -> tuple[int, Segment]:
        """Number and segment to which the next tokens of the tier of `bits` are appended."""
        last = self._segments.get(self._open_numbers.get(bits, -1))
        if last is None or last.is_full:
            ahead, tensors = self._next_tensors, None
            if bits == EXACT and ahead is not None:
                self._next_tensors = None
                tensors = ahead.result() if ahead.done() else None
            last = self._segments[self._segment_count] = Segment(like, bits, tensors)
            self._numbers_by_tier[bits][self._segment_count] = None
            self._bytes_by_tier[bits] += last.nbytes
            self._open_numbers[bits] = self._segment_count
            self._segment_count += 1
        return self._open_numbers[bits], last

    def _finish_first_transfer(self) -> None:
        """Wait until the oldest unfinished copy is in its places; write full segments to files."""
        stored, parts = self._unfinished.pop(0)
        if stored is not None:
            stored.result()
        for number, segment, at, count in parts:
            if at + count == SEGMENT_ROWS and number in self._segments:  # not dropped meanwhile
                self._files.put(number, segment)

    def _flush(self) -> None:
        while self._unfinished:
            self._finish_first_transfer()

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        del self._numbers_by_tier[segment.bits][number]
        self._bytes_by_tier[segment.bits] -= segment.nbytes
        self._files.drop(number)
        if self._next_encoded and self._next_encoded[0] == number:
            self._next_encoded = None


class Segment:
    """The keys and values of up to `SEGMENT_ROWS` tokens, filled from the front.

    The tensors, or `tensors` made ahead, are shaped as those of `like`: [H, n, D], or `quantized`.
    """

    def __init__(
        self, like: list[Tensor], bits: int = EXACT, tensors: list[Tensor] | None = None
    ) -> None:
        self.bits = bits
        self.tensors = tensors or [
            torch.zeros((tensor.shape[0], SEGMENT_ROWS, tensor.shape[2]), dtype=tensor.dtype)
            for tensor in like
        ]
        self.positions = np.full(SEGMENT_ROWS, -1, np.int64)  # -1: no token, or erased
        self.written_at = np.zeros(SEGMENT_ROWS, np.int64)
        self.used = 0
        self.has_file = False  # or soon will have one
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_full(self) -> bool:
        return self.used == SEGMENT_ROWS

    @property
    def stored(self) -> Positions:
        """Stream positions of the stored tokens."""
        return self.positions[self.positions >= 0]

    def rows(self, places: NDArray[np.int64], tensors: list[Tensor]) -> KeyValues:
        """Copies of the tokens at `places` [k] of `tensors`, which may be encoded in other bits."""
        chosen = torch.from_numpy(places)
        copies = [tensor.index_select(1, chosen) for tensor in tensors]
        return KeyValues(self.positions[places], self.written_at[places], copies)

    def reserve(self, positions: Positions, written_at: NDArray[np.int64]) -> None:
        """Reserve the next places for tokens whose tensors `put` writes later."""
        end = self.used + len(positions)
        self.positions[self.used : end] = positions
        self.written_at[self.used : end] = written_at
        self.used = end

    def put(self, start: int, tensors: list[Tensor]) -> None:
        """Write keys and values [H, k, D] into the places from `start` on."""
        for stored, given in zip(self.tensors, tensors, strict=True):
            stored[:, start : start + given.shape[1]].copy_(given)

    def erase(self, places: NDArray[np.int64], is_open: bool) -> None:
        """Overwrite the keys and values at `places` [k] with zeros."""
        # In an open segment, which gets more tokens, erased places at the end are free again.
        self.positions[places] = -1
        self.tensors = [tensor.clone() for tensor in self.tensors]  # a memory map is read-only
        for tensor in self.tensors:
            tensor[:, torch.from_numpy(places)] = 0
        while is_open and self.used and self.positions[self.used - 1] < 0:
            self.used -= 1


@torch.inference_mode()
def _store(transfer: Transfer, parts: list[_Part]) -> None:
    """Wait for the copy of tokens, and write them to the places reserved for them."""
    tensors, start = transfer.take(), 0
    for _, segment, at, count in parts:
        segment.put(at, [tensor[:, start : start + count] for tensor in tensors])
        start += count


def _touched_zeros(like: list[Tensor]) -> list[Tensor]:
    """Zeros in memory that the system has already given, which takes it most of the time."""
    new = [torch.empty_like(tensor) for tensor in like]
    for tensor in new:
        tensor.view(torch.uint8).numpy().fill(0)  # with one thread, unlike torch
    return new


_Part = tuple[int, Segment, int, int]  # a segment's number, the segment, first place, tokens


class SegmentFiles:
    """A private folder with one file for each full segment; with `folder` None, nothing is written.

    A background thread writes the files. They are read through memory maps, so that only the pages
    in use take memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.error: str | None = None
        self._folder = ArchiveFolder(folder) if folder is not None else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._pending: list[Future[None]] = []

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Call `work` in the thread that writes the files, after its pending work."""
        return self._writer.submit(work)

    def put(self, number: int, segment: Segment) -> None:
        """Let a thread write a full segment, whose tensors are then memory maps of the file."""
        if self._folder is not None:
            segment.has_file = True
            self._pending = [future for future in self._pending if not future.done()]
            self._pending.append(self._writer.submit(self._write, self._folder, number, segment))

    def drop(self, number: int) -> None:
        if self._folder is not None:
            self._pending.append(self._writer.submit(_delete, _path(self._folder, number)))

    def wait(self) -> None:
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
            segment.has_file = False
            for one in (new, path):  # a part would fill the disk for good, an old one has more
                with suppress(OSError):
                    one.unlink(missing_ok=True)


def _path(folder: ArchiveFolder, number: int) -> Path:
    return folder.path / f"{number:06}.safetensors"


def _delete(path: Path) -> None:
    with suppress(OSError):  # the folder is deleted when the program ends
        path.unlink(missing_ok=True)


class ArchiveFolder:
    """A folder that is deleted with all its files when the program ends or `remove` is called.

    A killed process can't remove it. So it has a lock, which the operating system frees when the
    process ends in any way, and `remove_stale_folders` looks for freed locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock_of(path)
        self.remove = weakref.finalize(self, _remove, path, self._lock)

    def make(self) -> None:
        """Make the folder, unless it exists, for this user alone, and lock it; raises OSError."""
        make_private_dir(self.path.parent)
        if not self._lock.is_locked:
            self._lock.acquire(blocking=False)  # first, so that no other process sweeps it
        make_private_dir(self.path)


def remove_stale_folders(parent: Path) -> None:
    """Delete the folders in `parent` whose processes have ended, where possible."""
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            if path.is_symlink():
                continue
            is_stale_lock = path.suffix == _LOCK_SUFFIX and not path.with_suffix("").exists()
            if is_stale_lock and time.time() - path.stat().st_mtime > _STALE_LOCK_SECONDS:
                path.unlink()
            elif path.is_dir():
                lock = _lock_of(path)
                with suppress(Timeout, OSError):
                    lock.acquire(blocking=False)
                    _remove(path, lock)


def _lock_of(path: Path) -> FileLock:
    return FileLock(path.with_name(path.name + _LOCK_SUFFIX), mode=0o600, thread_local=False)


def _remove(path: Path, lock: FileLock) -> None:
    if not lock.is_locked:  # there is no folder, or another process uses it
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.release()
    with suppress(OSError):
        Path(lock.lock_file).unlink()
