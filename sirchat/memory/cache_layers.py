"""The layers of the KV cache: the rows of keys and values of each layer, in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sirchat.memory.rope import Rotation

LayerKind = tuple[bool, int]
"""Kind of a layer: whether it has keys and values, and how many recurrent or convolution states."""

CacheState = tuple[dict[tuple[str, int], Tensor], ...]
"""A copy of the states of all recurrent and convolution layers, one dictionary for each layer.

The key of a tensor is its kind, `conv` or `recurrent`, and its number.
"""


@dataclass
class Cursor:
    """Numbers of cache rows, which are the same for all layers.

    `length` rows are in use, `capacity` rows are allocated, and the last forward pass has written
    `written` rows.
    """

    length: int
    capacity: int
    written: int = 0


@dataclass(frozen=True)
class LayerRotation:
    """The rotary position embeddings of one layer's keys and of its values.

    None means that keys or values are not rotated.
    """

    key: Rotation | None
    value: Rotation | None = None


class CachedTensor:
    """The keys or the values of one layer of the cache, in a buffer [copies, 1, H, capacity, D].

    With a rotary position embedding (`rotation`), `copies` is 2: copy 0 has the rows as attention
    reads them, copy 1 has the rows as first written. Without one, `copies` is 1. If `dtype` or
    `device` is None, the buffer gets the dtype or device of the first rows written.
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
        """Write m new `rows` [1, H, m, D] into the buffer, after the n rows in use.

        Returns all rows [1, H, n + m, D] as attention reads them, in the dtype of `rows`. The
        result is a view of the buffer, or a copy if the buffer has another dtype.
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
        """Move the rows in the buffer's slots `tail` [t] to the slots from `start` on.

        The copy of these rows that attention reads is computed from the first-written rows, which
        are rotated by the cosines and sines `cos_sin`.
        """
        if self.buffer is None:
            return
        end = start + len(tail)
        rows = self.buffer[-1][:, :, tail]  # [1, H, t, D]; index_select takes twice as long
        self.buffer[-1, :, :, start:end] = rows
        if self.rotation is not None and cos_sin is not None:
            self.buffer[0, :, :, start:end] = self.rotation.apply(rows, *cos_sin)

    def first_written(self, rows: Tensor) -> Tensor:
        """A copy [H, k, D] of the rows in the buffer's slots `rows` [k], as first written."""
        written = self._written()
        return written.index_select(2, rows.to(written.device))[0]

    def replace(self, cursor: Cursor, rows: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> None:
        """Write `rows` [H, n, D] to the buffer's slots 0 to n - 1.

        The rows are as first written. The copy that attention reads is rotated by the cosines and
        sines `cos_sin`.
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
        """Insert `rows` [H, k, D] into the buffer before slot `start`.

        The rows are rotated by the cosines and sines `cos_sin`; the rotated rows are stored both as
        those that attention reads and as the first-written ones. Before that, the first-written
        rows in slots `start` to `end` - 1 move up by k.
        """
        count, written = rows.shape[1], self._written()
        written[:, :, start + count : end + count] = written[:, :, start:end].clone()
        if self.rotation is not None and cos_sin is not None:
            rows = self.rotation.apply(rows, *cos_sin).to(rows.dtype)
            self.attended[0, :, start : start + count] = rows
        written[0, :, start : start + count] = rows

    def grow(self, cursor: Cursor) -> None:
        """Allocate a new buffer for `cursor.capacity` rows, and copy the rows in use to it."""
        if self.buffer is None:
            return
        copies, batch, heads, _, dims = self.buffer.shape
        grown = self.buffer.new_empty((copies, batch, heads, cursor.capacity, dims))
        grown[:, :, :, : cursor.length] = self.buffer[:, :, :, : cursor.length]
        self.buffer = self._use(grown)

    def _allocate(self, cursor: Cursor, rows: Tensor) -> Tensor:
        """Allocate and return the buffer; heads H, dimensions D and dtype are those of `rows`."""
        copies = 1 if self.rotation is None else 2
        shape = (copies, *rows.shape[:2], cursor.capacity, rows.shape[3])
        self.device = self.device or rows.device
        kind = self._dtype or rows.dtype
        self.buffer = self._use(rows.new_empty(shape, dtype=kind, device=self.device))
        return self.buffer

    def _written(self) -> Tensor:
        """A view [1, H, capacity, D] of the buffer's copy with the rows as first written."""
        if self.buffer is None:
            raise LookupError("this layer has not been written yet")
        return self.buffer[-1]

    def _use(self, buffer: Tensor) -> Tensor:
        self.attended = buffer[0]  # [1, H, capacity, D]
        return buffer


RowArguments = tuple[Cursor, LayerRotation, torch.dtype | None, torch.device | None]
"""The arguments of the constructor of `RowLayer`."""


class RowLayer:
    """The keys and values of one layer of the KV cache.

    A layer with sliding-window attention stores as many rows as any other layer.
    """

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
        """Write m new keys and values [1, H, m, D] into the layer, after the n rows in use.

        Returns all keys and all values, each [1, H, n + m, D].
        """
        keys, values = self.tensors
        self.cursor.written = key_states.shape[2]
        return keys.write(self.cursor, key_states), values.write(self.cursor, value_states)


@runtime_checkable
class HoldsState(Protocol):
    """Protocol of a cache layer with recurrent or convolution states."""

    def copy_state(self) -> dict[tuple[str, int], Tensor]:
        """A copy of the layer's states: a tensor for each kind (`conv`, `recurrent`) and number.

        States to which nothing has been written are left out.
        """

    def set_state(self, state: dict[tuple[str, int], Tensor]) -> None:
        """Replace the layer's states by a copy of `state`."""


def layer_numbers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """Map the numbers of layers in the model to their numbers among layers with keys and values.

    `kinds` has the kind of each layer of the model; layers without keys and values are left out.
    """
    with_rows = (number for number, (has_rows, _) in enumerate(kinds) if has_rows)
    return {number: at for at, number in enumerate(with_rows)}
