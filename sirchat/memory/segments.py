"""Blocks of archived rows: in RAM while they fill, then in RAM or in a private file each."""

from __future__ import annotations

import os
import shutil
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Positions = NDArray[np.int64]

SEGMENT_ROWS = 512


@dataclass(frozen=True)
class Rows:
    """Keys and values of n rows as first written, wherever they are or go.

    Attributes:
        positions: stream positions [n].
        written_at: cache slots [n] at which they were first written; their rotation.
        tensors: two for each layer, key then value, each [H, n, D].
    """

    positions: Positions
    written_at: NDArray[np.int64]
    tensors: list[Tensor]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values, in bytes."""
        return sum(one.numel() * one.element_size() for one in self.tensors)

    def to(self, device: torch.device | str) -> Rows:
        """The same rows on a device."""
        return Rows(self.positions, self.written_at, [one.to(device) for one in self.tensors])

    def take(self, index: NDArray[np.int64]) -> Rows:
        """The rows at `index` [k]."""
        chosen = torch.from_numpy(index)
        tensors = [one.index_select(1, chosen.to(one.device)) for one in self.tensors]
        return Rows(self.positions[index], self.written_at[index], tensors)

    def between(self, start: int, end: int) -> Rows:
        """The rows from `start` to before `end`: views."""
        tensors = [one[:, start:end] for one in self.tensors]
        return Rows(self.positions[start:end], self.written_at[start:end], tensors)


class Segment:
    """A block of `SEGMENT_ROWS` rows, filled from the front."""

    def __init__(self, like: list[Tensor]) -> None:
        shapes = [(one.shape[0], SEGMENT_ROWS, one.shape[2]) for one in like]
        pairs = zip(shapes, like, strict=True)
        self.tensors = [torch.zeros(shape, dtype=one.dtype) for shape, one in pairs]
        self.positions = np.full(SEGMENT_ROWS, -1, np.int64)  # -1: no row, or erased
        self.written_at = np.zeros(SEGMENT_ROWS, np.int64)
        self.used = 0
        self.nbytes = sum(one.numel() * one.element_size() for one in self.tensors)

    @property
    def is_full(self) -> bool:
        """Whether no more rows go in."""
        return self.used == SEGMENT_ROWS

    def put(self, rows: Rows) -> None:
        """Append rows, for which there is room."""
        end = self.used + len(rows)
        for mine, given in zip(self.tensors, rows.tensors, strict=True):
            mine[:, self.used : end].copy_(given)
        self.positions[self.used : end] = rows.positions
        self.written_at[self.used : end] = rows.written_at
        self.used = end

    def erase(self, rows: NDArray[np.int64]) -> None:
        """Overwrite these rows [k] of the block."""
        self.positions[rows] = -1
        self.tensors = [one.clone() for one in self.tensors]  # what a file holds can't be written
        for one in self.tensors:
            one[:, torch.from_numpy(rows)] = 0
        while self.used and self.positions[self.used - 1] < 0:
            self.used -= 1  # what is free at the end is filled anew

    @property
    def is_empty(self) -> bool:
        """Whether all of its rows were erased."""
        return not (self.positions >= 0).any()


class SegmentFiles:
    """A private folder with a file for each full segment, written in a thread of its own.

    Files are read through memory maps, so that only what is looked at takes memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble: str | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._pending: list[Future[None]] = []
        self._delete_all = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def put(self, number: int, segment: Segment) -> None:
        """Write a full segment, later; its tensors come from the file from then on."""
        self._pending = [one for one in self._pending if not one.done()]
        self._pending.append(self._writer.submit(self._write, number, segment))

    def drop(self, number: int) -> None:
        """Delete a segment's file, once it is written."""
        self._pending.append(self._writer.submit(self._delete, number))

    def wait(self) -> None:
        """Until all is written; afterwards `trouble` says what could not be."""
        for one in self._pending:
            one.result()
        self._pending = []

    def close(self) -> None:
        """Delete everything; happens by itself when the program ends."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._delete_all()

    @torch.inference_mode()
    def _write(self, number: int, segment: Segment) -> None:
        path = self._path(number)
        new = path.with_suffix(".safetensors.new")
        try:
            for folder in reversed([self.folder, *self.folder.parents]):
                folder.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            save_file({str(n): one for n, one in enumerate(segment.tensors)}, new)
            os.chmod(new, 0o600)
            os.replace(new, path)
            stored = load_file(path)
            segment.tensors = [stored[str(n)] for n in range(len(stored))]
        except OSError as error:
            self.trouble = f"{error.strerror or error}: {self.folder}"
        except Exception as error:  # safetensors has its own for a full disk
            self.trouble = f"{error}: {self.folder}"

    def _delete(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"
