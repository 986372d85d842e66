"""The layers of the KV cache: the rows of keys and values of each layer, in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sirchat.memory.rope import Rotation

LayerKind = tuple[bool, int]
"""Whether a layer has keys and values, and its number of recurrent or convolution states."""

CacheState = tuple[dict[tuple[str, int], Tensor], ...]
"""For each layer with a state, a copy of its tensors by kind (`conv`, `recurrent`) and number."""


@dataclass
class Cursor:
    """Row counts, the same for all layers: in use, allocated, and written by the last pass."""

    length: int
    capacity: int
    written: int = 0


@dataclass(frozen=True)
class LayerRotation:
    """Rotary position embeddings of a layer's keys and of its values; None means no rotation."""

    key: Rotation | None
    value: Rotation | None = None


class CachedTensor:
    """One cached tensor of one layer, in a buffer [copies, 1, H, capacity, D].

    `copies` is 2 for a tensor with rotary positions: copy 0 has the rows as attention reads them,
    copy 1 the rows as first written. `copies` is 1 for a tensor without a rotation. If `dtype` or
    `device` is None, the buffer gets that of the first rows written.
    """

    def __init__(
        self,
        rotation: Rotation | None,
        dtype: torch.dtype | None,
        device: torch.device | None = None,
    ) -> None:
        self.rotation = rotation
        self._dtype, self.device = dtype, device
        self.buffer: Tensor | None = None

    def write(self, cursor: Cursor, rows: Tensor) -> Tensor:
        """Write m new `rows` [1, H, m, D] after the n rows in use; returns all [1, H, n + m, D].

        The result has the dtype of `rows`; it is a view unless the buffer has another dtype.
        """
        count = rows.shape[2]
        end = cursor.length + count
        if self.buffer is None:
            self.buffer = self._allocate(cursor, rows)
        if end > self.buffer.shape[3]:  # `narrow` would fail too, but not name the limit
            raise RuntimeError(f"the cache has room for {self.buffer.shape[3]} rows, not for {end}")
        # narrow takes half the time of indexing, and this runs for every token and layer
        self.buffer.narrow(3, cursor.length, count).copy_(rows)
        return self.attended.narrow(2, 0, end).to(rows.dtype)

    def compact(self, tail: Tensor, start: int, cos_sin: tuple[Tensor, Tensor] | None) -> None:
        """Move the rows in slots `tail` [t] to the slots from `start` on.

        The rows that attention reads are computed from the first-written ones, rotated by
        `cos_sin`.
        """
        if self.buffer is None:
            return
        end = start + len(tail)
        rows = self.buffer[-1][:, :, tail]  # [1, H, t, D]; index_select takes twice as long
        self.buffer[-1, :, :, start:end] = rows
        if self.rotation is not None and cos_sin is not None:
            self.buffer[0, :, :, start:end] = self.rotation.apply(rows, *cos_sin)

    def first_written(self, rows: Tensor) -> Tensor:
        """The rows in slots `rows` [k] as first written: a copy [H, k, D]."""
        written = self._written()
        return written.index_select(2, rows.to(written.device))[0]

    def replace(self, cursor: Cursor, rows: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> None:
        """Write first-written `rows` [H, n, D] to the slots 0 to n - 1.

        Attention reads these rows rotated by the cosines and sines `cos_sin`.
        """
        count = rows.shape[1]
        if self.buffer is None:
            self._allocate(cursor, rows[None])
        written = self._written()
        written[0, :, :count] = rows
        if self.rotation is not None and cos_sin is not None:
            self.attended[0, :, :count] = self.rotation.apply(written[0, :, :count], *cos_sin)

    def insert(
        self, start: int, end: int, rows: Tensor, cos_sin: tuple[Tensor, Tensor] | None
    ) -> None:
        """Write `rows` [H, k, D], rotated by `cos_sin`, to the slots from `start` on.

        Before that, the rows in slots `start` to `end` - 1 move up by k. The rotated rows are also
        stored as the first-written ones.
        """
        count, written = rows.shape[1], self._written()
        written[:, :, start + count : end + count] = written[:, :, start:end].clone()
        if self.rotation is not None and cos_sin is not None:
            rows = self.rotation.apply(rows, *cos_sin).to(rows.dtype)
            self.attended[0, :, start : start + count] = rows
        written[0, :, start : start + count] = rows

    def grow(self, cursor: Cursor) -> None:
        """Allocate a buffer for `cursor.capacity` rows, and copy the rows in use to it."""
        if self.buffer is None:
            return
        copies, batch, heads, _, dims = self.buffer.shape
        grown = self.buffer.new_empty((copies, batch, heads, cursor.capacity, dims))
        grown[:, :, :, : cursor.length] = self.buffer[:, :, :, : cursor.length]
        self.buffer = self._use(grown)

    def _allocate(self, cursor: Cursor, rows: Tensor) -> Tensor:
        """Allocate the buffer; it gets its heads H, dimensions D and dtype from `rows`."""
        copies = 1 if self.rotation is None else 2
        shape = (copies, *rows.shape[:2], cursor.capacity, rows.shape[3])
        self.device = self.device or rows.device
        kind = self._dtype or rows.dtype
        self.buffer = self._use(rows.new_empty(shape, dtype=kind, device=self.device))
        return self.buffer

    def _written(self) -> Tensor:
        """The buffer's copy of the rows as first written [1, H, capacity, D]: a view."""
        if self.buffer is None:
            raise LookupError("this layer has not been written yet")
        return self.buffer[-1]

    def _use(self, buffer: Tensor) -> Tensor:
        self.attended = buffer[0]  # [1, H, capacity, D]
        return buffer


RowArguments = tuple[Cursor, LayerRotation, torch.dtype | None, torch.device | None]
"""The arguments of a `RowLayer`."""


class RowLayer:
    """One layer's keys and values. A sliding-window layer stores every row, like the others."""

    def __init__(
        self,
        cursor: Cursor,
        rotation: LayerRotation,
        dtype: torch.dtype | None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.cursor = cursor
        key, value = rotation.key, rotation.value
        self.tensors = CachedTensor(key, dtype, device), CachedTensor(value, dtype, device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write m new keys and values [1, H, m, D] after the n rows in use; returns all n + m."""
        keys, values = self.tensors
        self.cursor.written = key_states.shape[2]
        return keys.write(self.cursor, key_states), values.write(self.cursor, value_states)


@runtime_checkable
class HoldsState(Protocol):
    """A layer with recurrent or convolution states."""

    def copy_state(self) -> dict[tuple[str, int], Tensor]:
        """A copy of the layer's states, by kind and number; states never written are left out."""

    def set_state(self, state: dict[tuple[str, int], Tensor]) -> None:
        """Replace the layer's states by a copy of `state`."""


def layer_numbers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """For each layer with rows: its number in the model, mapped to its number among such layers."""
    with_rows = (number for number, (has_rows, _) in enumerate(kinds) if has_rows)
    return {number: at for at, number in enumerate(with_rows)}
