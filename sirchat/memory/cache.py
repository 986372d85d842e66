"""The KV cache: buffers of fixed size, to which rows are appended and from which rows are evicted.

It is a `transformers.Cache`, so every model with per-token keys and values can use it unpatched.
Keys with a rotary position are kept twice: as first written, and rotated to their present position.
A moved key is always computed from the first-written one, so keys never drift, however often rows
before them are evicted.

A row is the keys and values of one token in all layers; a slot is its index in the buffers.
`insert` can put a block of extra rows, different ones in each layer, between the held rows. Row
numbers count held rows only, so an insertion does not change them.

A forward pass writes its new rows after the last row. They become held rows only by `commit`, so an
interrupted pass leaves the cache unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sirchat.memory.rope import CosSin, Rotation
from sirchat.memory.segments import Positions, Rows


@dataclass
class _Cursor:
    """Numbers shared by all layers: how many rows are in use, and how many are allocated."""

    length: int
    capacity: int


@dataclass(frozen=True)
class LayerRotation:
    """The rotary position embedding of a layer's keys and of its values; None if they have none."""

    key: Rotation | None
    value: Rotation | None = None


class _Tensor:
    """One cached tensor of one layer, in a buffer [copies, 1, H, capacity, D].

    `copies` is 2 for a tensor with rotary positions: copy 0 is what attention reads, copy 1 has the
    rows as first written. It is 1 for a tensor without a rotation. The buffer's number type is
    `dtype`; if `dtype` is None, it is the type of the first rows written.
    """

    def __init__(self, rotation: Rotation | None, dtype: torch.dtype | None) -> None:
        self.rotation = rotation
        self._dtype = dtype
        self.buffer: Tensor | None = None

    def write(self, cursor: _Cursor, rows: Tensor) -> Tensor:
        """Write m new `rows` [1, H, m, D] after the last of n; returns all rows [1, H, n + m, D].

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

        What attention reads there is computed from the first-written rows, rotated by `cos_sin`.
        """
        if self.buffer is None:
            return
        end = start + len(tail)
        rows = self.buffer[-1].index_select(2, tail)  # [1, H, t, D]
        self.buffer[-1, :, :, start:end] = rows
        if self.rotation is not None and cos_sin is not None:
            self.buffer[0, :, :, start:end] = self.rotation.apply(rows, *cos_sin)

    def first_written(self, rows: Tensor) -> Tensor:
        """The rows in slots `rows` [k] as first written: a copy [H, k, D]."""
        written = self._written()
        return written.index_select(2, rows.to(written.device))[0]

    def replace(self, cursor: _Cursor, rows: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> None:
        """Write first-written `rows` [H, n, D] to the slots 0 to n - 1.

        What attention reads there is `rows` rotated by the cosines and sines `cos_sin`.
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

    def grow(self, cursor: _Cursor) -> None:
        """Allocate a buffer for `cursor.capacity` rows, and copy the rows in use to it."""
        if self.buffer is None:
            return
        copies, batch, heads, _, dims = self.buffer.shape
        grown = self.buffer.new_empty((copies, batch, heads, cursor.capacity, dims))
        grown[:, :, :, : cursor.length] = self.buffer[:, :, :, : cursor.length]
        self.buffer = self._use(grown)

    def _allocate(self, cursor: _Cursor, rows: Tensor) -> Tensor:
        """Allocate the buffer; it gets its heads H, dimensions D and dtype from `rows`."""
        copies = 1 if self.rotation is None else 2
        shape = (copies, *rows.shape[:2], cursor.capacity, rows.shape[3])
        self.buffer = self._use(rows.new_empty(shape, dtype=self._dtype or rows.dtype))
        return self.buffer

    def _written(self) -> Tensor:
        """The buffer's copy of the rows as first written [1, H, capacity, D]: a view."""
        if self.buffer is None:
            raise LookupError("this layer has not been written yet")
        return self.buffer[-1]

    def _use(self, buffer: Tensor) -> Tensor:
        self.attended = buffer[0]  # [1, H, capacity, D]
        return buffer


class _BoundedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer's keys and values. A sliding-window layer stores every row, like the others."""

    is_sliding = False

    def __init__(self, cursor: _Cursor, rotation: LayerRotation, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.cursor = cursor
        self.tensors = (_Tensor(rotation.key, dtype), _Tensor(rotation.value, dtype))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.tensors
        return keys.write(self.cursor, key_states), values.write(self.cursor, value_states)

    def get_seq_length(self) -> int:
        return self.cursor.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class BoundedCache(Cache):  # type: ignore[misc]
    """A KV cache from which any row can be evicted; a row is one token's keys and values.

    Held row number i is in slot i of every layer, unless extra rows are inserted before it.

    Args:
        rotations: rotary position embedding of the keys and values, one entry per layer.
        capacity: number of rows to allocate.
        dtype: number type of the buffers; None for that of the first keys and values written.
    """

    in_stream = False
    """Whether a key's rotary position is its stream position, and not its slot in the cache."""

    def __init__(
        self, rotations: list[LayerRotation], capacity: int, dtype: torch.dtype | None = None
    ) -> None:
        self._cursor = _Cursor(0, capacity)
        self._written_at = np.zeros(capacity, np.int64)
        self._stream = np.zeros(capacity, np.int64)
        self._slots = np.arange(capacity)
        self._inserted = range(0)  # slots of the inserted rows
        layers = [_BoundedLayer(self._cursor, rotation, dtype) for rotation in rotations]
        super().__init__(layers=layers)

    @property
    def length(self) -> int:
        """Number of rows that attention reads: held rows and inserted rows."""
        return self._cursor.length

    @property
    def inserted_count(self) -> int:
        """Number of extra rows that `insert` has put into each layer."""
        return len(self._inserted)

    @property
    def capacity(self) -> int:
        """Number of rows that fit without reallocating."""
        return self._cursor.capacity

    @property
    def _tensors(self) -> list[_Tensor]:
        """The tensors of all layers: key of layer 0, value of layer 0, key of layer 1, ..."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def nbytes(self) -> int:
        """Size of all buffers, in bytes."""
        buffers = [tensor.buffer for tensor in self._tensors]
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

    def commit(self, count: int, positions: Positions | range | None = None) -> None:
        """Add to the held rows the `count` rows that a forward pass has written after them.

        `positions` [count] are the new rows' stream positions; by default they follow the last one.
        """
        start = self._cursor.length
        if positions is None:
            first = int(self._stream[start - 1]) + 1 if start else 0
            positions = range(first, first + count)
        end = start + count
        self._stream[start:end] = positions
        rotary = self._stream if self.in_stream else self._slots
        self._written_at[start:end] = rotary[start:end]
        self._cursor.length = end

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Remove all held rows except those numbered `rows` [k] (int64, ascending).

        Inserted rows stay.
        """
        if self._inserted:
            before = int((rows < self._inserted.start).sum())
            inserted = torch.arange(self._inserted.start, self._inserted.stop)
            slots = self.slots_of(rows)
            rows = torch.cat((slots[:before], inserted, slots[before:]))
            self._inserted = range(before, before + len(inserted))
        self._keep_slots(rows)

    @torch.inference_mode()
    def insert(self, start: int, layers: list[Rows]) -> None:
        """Put the extra rows `layers[i]` into layer i, before held row number `start`.

        All layers get equally many rows. Rows inserted earlier are removed first; the new ones
        stay until `remove_inserted`.
        """
        self.remove_inserted()
        end, count = self.length, len(layers[0])
        self.grow_to(end + count)
        slots = torch.arange(start, start + count)
        for layer, rows in zip(self.layers, layers, strict=True):
            new = torch.from_numpy(rows.positions) if self.in_stream else slots
            moves = CosSin(torch.from_numpy(rows.written_at), new)
            for tensor, given in zip(layer.tensors, rows.tensors, strict=True):
                device = tensor.attended.device
                tensor.insert(start, end, given.to(device), moves.of(tensor.rotation, device))
        for column in (self._written_at, self._stream):
            column[start + count : end + count] = column[start:end].copy()
        self._written_at[start : start + count] = slots.numpy()
        self._stream[start : start + count] = -1  # they differ from layer to layer
        self._inserted = range(start, start + count)
        self._cursor.length = end + count
        moved = torch.arange(start + count, end + count)
        written_at = torch.from_numpy(self._written_at[start + count : end + count])
        self._compact(moved, start + count, written_at, self._rotary_positions(moved))

    @torch.inference_mode()
    def remove_inserted(self) -> None:
        """Remove the extra rows that `insert` has put into the cache, if any."""
        rows = torch.arange(self.length - self.inserted_count)
        slots, self._inserted = self.slots_of(rows), range(0)
        if len(slots) < self.length:
            self._keep_slots(slots)

    def slots_of(self, rows: Tensor) -> Tensor:
        """The slots [k] of the held rows numbered `rows` [k].

        The slot of a row after the inserted rows is its number plus `inserted_count`.
        """
        if not self._inserted:
            return rows
        return rows + (rows >= self._inserted.start) * self.inserted_count

    def _keep_slots(self, rows: Tensor) -> None:
        slots = torch.arange(len(rows))
        moved = (rows != slots).nonzero()
        start = int(moved[0, 0]) if len(moved) else len(rows)
        tail = rows[start:]
        if len(tail):
            written_at = self._written_at[tail.numpy()]
            self._stream[start : len(rows)] = self._stream[tail.numpy()]
            new = self._rotary_positions(slots[start:])
            self._compact(tail, start, torch.from_numpy(written_at), new)
            self._written_at[start : len(rows)] = written_at
        self._cursor.length = len(rows)

    @torch.inference_mode()
    def first_written(self, rows: Tensor, positions: NDArray[np.int64]) -> Rows:
        """A copy of the held rows numbered `rows` [k], with their keys as first written.

        `positions` [k] are the stream positions of these rows.
        """
        rows = self.slots_of(rows)
        tensors = [tensor.first_written(rows) for tensor in self._tensors]
        return Rows(positions, self._written_at[rows.numpy()], tensors)

    @torch.inference_mode()
    def rotated(self, rows: Rows, slots: Tensor) -> Rows:
        """The first-written `rows` [k], rotated as attention would read them in slots [k]."""
        new = torch.from_numpy(rows.positions) if self.in_stream else slots
        moves = CosSin(torch.from_numpy(rows.written_at), new)
        moved = list[Tensor]()
        for tensor, given in zip(self._tensors, rows.tensors, strict=True):
            rotation, cos_sin = tensor.rotation, moves.of(tensor.rotation, given.device)
            if rotation is not None and cos_sin is not None:
                given = rotation.apply(given, *cos_sin)
            moved.append(given)
        return Rows(rows.positions, rows.written_at, moved)

    @torch.inference_mode()
    def replace(self, rows: Rows) -> None:
        """Replace all rows by the first-written `rows` [n], which go into slots 0 to n - 1.

        Their keys are rotated to their new positions.
        """
        count = len(rows)
        self._inserted = range(0)
        self.grow_to(count)
        self._stream[:count] = rows.positions
        written_at = torch.from_numpy(rows.written_at)
        moves = CosSin(written_at, self._rotary_positions(torch.arange(count)))
        for tensor, given in zip(self._tensors, rows.tensors, strict=True):
            device = given.device if tensor.buffer is None else tensor.buffer.device
            tensor.replace(self._cursor, given.to(device), moves.of(tensor.rotation, device))
        self._written_at[:count] = rows.written_at
        self._cursor.length = count

    @torch.inference_mode()
    def set_positions(self, *, in_stream: bool) -> None:
        """Rotate each key: to its stream position if `in_stream`, else to its slot in the cache."""
        if in_stream == self.in_stream:
            return
        self.in_stream = in_stream
        if self.length:
            rows, inserted = torch.arange(self.length), self._inserted
            self._inserted = range(0)
            self.replace(self.first_written(rows, self._stream[: self.length].copy()))
            self._inserted = inserted

    @torch.no_grad()
    def grow_to(self, capacity: int) -> None:
        """Allocate at least `capacity` rows; buffers never shrink."""
        if capacity <= self.capacity:
            return
        for name in ("_written_at", "_stream"):
            grown = np.zeros(capacity, np.int64)
            grown[: self.length] = getattr(self, name)[: self.length]
            setattr(self, name, grown)
        self._slots = np.arange(capacity)
        self._cursor.capacity = capacity
        for tensor in self._tensors:
            tensor.grow(self._cursor)

    def _rotary_positions(self, slots: Tensor) -> Tensor:
        """The positions to which the keys in these slots [n] are rotated."""
        if not self.in_stream:
            return slots
        return torch.from_numpy(self._stream[slots.numpy()].clip(min=0))

    def layer_keys(self, layer: int) -> Tensor:
        """A layer's keys as attention reads them: [1, H, n, D] (a view)."""
        return self._view(layer, 0)

    @torch.inference_mode()
    def as_read(self, rows: Tensor) -> list[Tensor]:
        """The held rows numbered `rows` [k], rotated as attention reads them.

        A list of tensors [H, k, D]: keys of layer 0, values of layer 0, keys of layer 1, ...
        """
        slots = self.slots_of(rows)
        views = [self._view(at, which)[0] for at in range(len(self.layers)) for which in (0, 1)]
        if len(slots) == self.length:
            return views
        return [one.index_select(1, slots.to(one.device)) for one in views]

    def layer_values(self, layer: int) -> Tensor:
        """A layer's values as attention reads them: [1, H, n, D] (a view)."""
        return self._view(layer, 1)

    def _view(self, layer: int, which: int) -> Tensor:
        buffer = self.layers[layer].tensors[which].buffer
        if buffer is None:
            raise LookupError(f"layer {layer} has not been written yet")
        view: Tensor = buffer[0, :, :, : self.length]
        return view

    def _compact(self, tail: Tensor, start: int, old: Tensor, new: Tensor) -> None:
        moves = CosSin(old, new)
        on_device: dict[torch.device, Tensor] = {}
        for tensor in self._tensors:
            if tensor.buffer is not None:
                device = tensor.buffer.device
                index = on_device.setdefault(device, tail.to(device))
                tensor.compact(index, start, moves.of(tensor.rotation, device))
