"""Segments of the archive: blocks of keys and values of tokens, in RAM or in files."""

from __future__ import annotations

import os
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
from sirchat.memory.key_values import Positions

SEGMENT_ROWS = 512


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
