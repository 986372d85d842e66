"""Segments of the archive: blocks of keys and values in RAM, or in files of a private folder.

A process that is killed can't remove its folder. Therefore each folder has a lock, which the
operating system frees when the process ends in any way. `sweep` removes the folders whose lock is
free.
"""

from __future__ import annotations

import os
import shutil
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from sirchat.memory.free_memory import trim_memory
from sirchat.memory.key_values import Positions
from sirchat.paths import private_dir

_LOCK = ".lock"
_OLD = 24 * 3600  # seconds after which a lock without a folder is removed


class ArchiveFolder:
    """A folder for files of the archive of evicted tokens.

    The folder is deleted with all its files when the program ends or `remove` is called.

    Attributes:
        path: path of the folder, which exists after `make`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock_of(path)
        self.remove = weakref.finalize(self, _remove, path, self._lock)

    def make(self) -> None:
        """Make the folder, unless it exists, so that only this user can read it; lock it.

        Raises OSError if the folder can't be made.
        """
        private_dir(self.path.parent)
        if not self._lock.is_locked:
            self._lock.acquire(blocking=False)  # first, so that no other process sweeps it
        private_dir(self.path)


def sweep(parent: Path) -> None:
    """Delete the archive folders in `parent` that belong to processes that have ended.

    A folder that can't be deleted is skipped.
    """
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            if path.is_symlink():
                continue
            is_litter = path.suffix == _LOCK and not path.with_suffix("").exists()
            if is_litter and time.time() - path.stat().st_mtime > _OLD:
                path.unlink()
            elif path.is_dir():
                lock = _lock_of(path)
                with suppress(Timeout, OSError):
                    lock.acquire(blocking=False)
                    _remove(path, lock)


def _lock_of(path: Path) -> FileLock:
    return FileLock(path.with_name(path.name + _LOCK), mode=0o600, thread_local=False)


def _remove(path: Path, lock: FileLock) -> None:
    if not lock.is_locked:  # there is no folder, or another process uses it
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.release()
    with suppress(OSError):
        Path(lock.lock_file).unlink()


SEGMENT_ROWS = 512


class Segment:
    """A block of the archive with room for `SEGMENT_ROWS` rows (tokens), filled from the front.

    Args:
        like: tensors [H, n, D]; the segment's tensors have the same H, D and dtype.
    """

    def __init__(self, like: list[Tensor]) -> None:
        self.tensors = [
            torch.zeros((tensor.shape[0], SEGMENT_ROWS, tensor.shape[2]), dtype=tensor.dtype)
            for tensor in like
        ]
        self.positions = np.full(SEGMENT_ROWS, -1, np.int64)  # -1: no row, or erased
        self.written_at = np.zeros(SEGMENT_ROWS, np.int64)
        self.used = 0
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def is_full(self) -> bool:
        """Whether no more rows fit in this segment."""
        return self.used == SEGMENT_ROWS

    def reserve(self, positions: Positions, written_at: NDArray[np.int64]) -> None:
        """Reserve slots of this segment for rows whose keys and values `put` writes later.

        `positions` are the rows' stream positions, `written_at` their rotary positions. The segment
        must have enough free slots.
        """
        end = self.used + len(positions)
        self.positions[self.used : end] = positions
        self.written_at[self.used : end] = written_at
        self.used = end

    def put(self, start: int, tensors: list[Tensor]) -> None:
        """Write keys and values [H, k, D] of k rows into this segment's slots from `start` on."""
        for stored, given in zip(self.tensors, tensors, strict=True):
            stored[:, start : start + given.shape[1]].copy_(given)

    def erase(self, rows: NDArray[np.int64]) -> None:
        """Overwrite the rows numbered `rows` [k] in this segment with zeros."""
        self.positions[rows] = -1
        self.tensors = [tensor.clone() for tensor in self.tensors]  # a memory map is read-only
        for tensor in self.tensors:
            tensor[:, torch.from_numpy(rows)] = 0
        while self.used and self.positions[self.used - 1] < 0:
            self.used -= 1  # erased rows at the end are free again

    @property
    def is_empty(self) -> bool:
        """Whether the segment has no rows: none was ever reserved, or all have been erased."""
        return not (self.positions >= 0).any()


class SegmentFiles:
    """The archive's files: a private folder with one file for each full segment (block of rows).

    A background thread writes the files. They are read through memory maps, so that only the pages
    in use take memory.

    Attributes:
        error: message that says why a segment could not be written; None if there was no error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: str | None = None
        self._place = ArchiveFolder(folder)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._pending: list[Future[None]] = []

    def put(self, number: int, segment: Segment) -> None:
        """Write the full segment with this number to its file, in the background.

        When the file is written, the segment's tensors become memory maps of the file.
        """
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._writer.submit(self._write, number, segment))

    def drop(self, number: int) -> None:
        """Delete the file of the segment with this number, in the background.

        The file is deleted after all pending writes.
        """
        self._pending.append(self._writer.submit(self._delete, number))

    def wait(self) -> None:
        """Wait until all pending writes are done; `error` says if a write has failed."""
        for future in self._pending:
            future.result()
        self._pending = []

    def close(self) -> None:
        """Delete the folder and its files now; otherwise they are deleted when the program ends."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._place.remove()

    @torch.inference_mode()
    def _write(self, number: int, segment: Segment) -> None:
        path = self._path(number)
        new = path.with_suffix(".safetensors.new")
        try:
            self._place.make()
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            save_file({str(n): tensor for n, tensor in enumerate(segment.tensors)}, new)
            os.chmod(new, 0o600)
            os.replace(new, path)
            stored = load_file(path)
            segment.tensors = [stored[str(n)] for n in range(len(stored))]
            trim_memory()  # else what was in RAM leaves gaps in the heap
        except Exception as error:  # safetensors raises its own errors for a full disk
            self.error = f"{getattr(error, 'strerror', None) or error}: {self.folder}"
            with suppress(OSError):
                new.unlink(missing_ok=True)  # a part of a segment would fill the disk for good

    def _delete(self, number: int) -> None:
        with suppress(OSError):  # the folder is deleted when the program ends
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"
