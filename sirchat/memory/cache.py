"""The KV cache: buffers of fixed size, to which rows are appended and from which rows are evicted.

A row is the keys and values of one token in all layers; a slot is the row's index in the buffers.
Keys with a rotary position are kept twice: as first written, and rotated to their present position.
When a row moves, its key is always computed from the first-written one, so rounding errors never
add up, however often rows are evicted. `hub_cache.py` makes the cache a `transformers.Cache`.

`insert` can put a block of extra rows, different ones in each layer, between the held rows. Row
numbers count held rows only, so an insertion does not change them.

A forward pass writes its new rows after the last row. The new rows become held rows only by
`commit`, so an interrupted pass leaves the cache unchanged.

A recurrent or convolution layer has a state of constant size, which depends on every token read.
Evictions do not change the state. If a forward pass was not committed, `begin_pass` undoes the
changes that this pass made to the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.cache_layers import (
    CachedTensor,
    CacheState,
    Cursor,
    HoldsState,
    LayerRotation,
    RowArguments,
    RowLayer,
)
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.rope import CosSin
from sirchat.memory.transfers import to_device


class BoundedCache:
    """A KV cache from which any row can be evicted; a row is one token's keys and values.

    Row number i is in slot i of every layer, unless extra rows are inserted before it.

    Args:
        rotations: rotary position embedding of the keys and values, one entry for each layer that
            has keys and values. Layer numbers in all methods count only these layers.
        capacity: number of rows to allocate.
        dtype: see the attribute `dtype`.
        devices: the device of each layer with keys and values; None to use the device of the first
            rows written.

    Attributes:
        layers: all layers of the model, in order.
        row_layers: the layers with keys and values.
        dtype: number type of the buffers; None for the type of the first keys and values written.
    """

    reads_singly = False
    """Whether the model's recurrent or convolution layers read only one token in a forward pass."""

    absolute_positions = False
    """Whether a key's rotary position is its token's index in the whole conversation.

    If False, the rotary position is the key's slot in the cache.
    """

    def __init__(
        self,
        rotations: list[LayerRotation],
        capacity: int,
        dtype: torch.dtype | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        self.cursor = Cursor(0, capacity)
        self._written_at = np.zeros(capacity, np.int64)
        self._stream = np.zeros(capacity, np.int64)
        self._slots = np.arange(capacity)
        self._inserted = range(0)  # slots of the inserted rows
        self.dtype = dtype
        where: Sequence[torch.device | None] = devices or [None] * len(rotations)
        pairs = zip(rotations, where, strict=True)
        own = [(self.cursor, rotation, dtype, device) for rotation, device in pairs]
        self.layers = self._new_layers(own)
        self.row_layers = [layer for layer in self.layers if isinstance(layer, RowLayer)]
        self._with_state = [layer for layer in self.layers if isinstance(layer, HoldsState)]
        self._state: CacheState = tuple({} for _ in self._with_state)
        self._is_clean = True  # whether no pass has begun since the last commit

    def _new_layers(self, rows: Sequence[RowArguments]) -> list[Any]:
        """Make the cache's empty layers; `rows` has the arguments of each layer's constructor."""
        return [RowLayer(*one) for one in rows]

    @property
    def length(self) -> int:
        """Number of rows that attention reads: held rows and the extra rows of `insert`."""
        return self.cursor.length

    @property
    def inserted_count(self) -> int:
        """Number of extra rows that `insert` has put into each layer of the cache."""
        return len(self._inserted)

    @property
    def capacity(self) -> int:
        """Number of rows that fit in the cache's buffers before these must be reallocated."""
        return self.cursor.capacity

    @property
    def _tensors(self) -> list[CachedTensor]:
        """The cached tensors of all layers: keys of layer 0, values of layer 0, and so on."""
        return [tensor for layer in self.row_layers for tensor in layer.tensors]

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent or convolution layers."""
        return bool(self._with_state)

    @property
    def state(self) -> CacheState:
        """The state of the recurrent and convolution layers.

        Assign an earlier value to restore that state. The empty tuple stands for the state before
        the first token.
        """
        return self._state

    @state.setter
    def state(self, state: CacheState) -> None:
        self._state = state or tuple({} for _ in self._with_state)
        self._is_clean = False
        self.roll_back()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Undo the changes of the last forward pass to the layers' state, if it is not committed.

        The state is that of recurrent and convolution layers.
        """
        if self._is_clean:
            return
        self.cursor.written = 0
        for layer, state in zip(self._with_state, self._state, strict=True):
            layer.set_state(state)
        self._is_clean = True

    def begin_pass(self) -> None:
        """Prepare for a forward pass; call this before each pass.

        If the previous pass was not committed, its changes to the layers' state are undone.
        """
        self.roll_back()
        self._is_clean = not self._with_state

    @property
    def nbytes(self) -> int:
        """Size of the cache in bytes: all buffers of keys and values, and all layers' states."""
        return sum(self.bytes_by_device().values())

    def bytes_by_device(self) -> Counter[torch.device]:
        """Size of the cache's buffers and states on each device, in bytes."""
        buffers = [tensor.buffer for tensor in self._tensors]
        states = [tensor for layer in self._state for tensor in layer.values()]
        sizes = Counter[torch.device]()
        for one in (*buffers, *states):
            if one is not None:
                sizes[one.device] += one.nbytes
        return sizes

    @property
    def devices(self) -> list[torch.device]:
        """The device of each layer's keys and values.

        Layers to which nothing has been written may have no device yet; they are skipped.
        """
        found = [layer.tensors[0].device for layer in self.row_layers]
        return [one for one in found if one is not None]

    @property
    def state_nbytes(self) -> int:
        """Size of the state of the recurrent and convolution layers, in bytes."""
        return sum(tensor.nbytes for layer in self._state for tensor in layer.values())

    def commit(self, count: int, positions: int | Positions | None = None) -> None:
        """Accept the `count` new rows that a forward pass has written after those held.

        `positions` are their stream positions [count], or the first one of a run; by default they
        continue from the last row's.
        """
        start = self.cursor.length
        end = start + count
        if self._with_state:
            if count != self.cursor.written:
                raise RuntimeError("a pass over layers with a state is committed as a whole")
            with torch.no_grad():
                self._state = tuple(layer.copy_state() for layer in self._with_state)
            self.cursor.written, self._is_clean = 0, True
        if positions is None:
            positions = int(self._stream[start - 1]) + 1 if start else 0
        if isinstance(positions, int) and count > 1:
            positions = np.arange(positions, positions + count)
        self._stream[start:end] = positions
        rotary = self._stream if self.absolute_positions else self._slots
        self._written_at[start:end] = rotary[start:end]
        self.cursor.length = end

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Remove all rows from the cache except those numbered `rows` [k] (int64, ascending).

        Extra rows that `insert` has put into the cache stay.
        """
        if self._inserted:
            before = int((rows < self._inserted.start).sum())
            inserted = torch.arange(self._inserted.start, self._inserted.stop)
            slots = self.slots_of(rows)
            rows = torch.cat((slots[:before], inserted, slots[before:]))
            self._inserted = range(before, before + len(inserted))
        self._keep_slots(rows)

    @torch.inference_mode()
    def insert(self, start: int, layers: list[KeyValues]) -> None:
        """Put the extra rows `layers[i]` into layer i, before row number `start` of the cache.

        All layers get equally many rows. Extra rows that were inserted earlier are removed first.
        The new rows stay until `remove_inserted` is called.
        """
        self.remove_inserted()
        end, count = self.length, len(layers[0])
        self.grow_to(end + count)
        slots = torch.arange(start, start + count)
        for layer, rows in zip(self.row_layers, layers, strict=True):
            new = torch.from_numpy(rows.positions) if self.absolute_positions else slots
            moves = CosSin(torch.from_numpy(rows.written_at), new)
            for tensor, given in zip(layer.tensors, rows.tensors, strict=True):
                device = tensor.attended.device
                own = to_device(given, device)
                tensor.insert(start, end, own, moves.of(tensor.rotation, device))
        for column in (self._written_at, self._stream):
            column[start + count : end + count] = column[start:end].copy()
        self._written_at[start : start + count] = slots.numpy()
        self._stream[start : start + count] = -1  # inserted rows differ from layer to layer
        self._inserted = range(start, start + count)
        self.cursor.length = end + count
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
        """The slots [k], indices in the cache's buffers, of the rows numbered `rows` [k].

        A row's slot is its number; for a row after the inserted rows, it is the number plus
        `inserted_count`.
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
        self.cursor.length = len(rows)

    @torch.inference_mode()
    def first_written(self, rows: Tensor, positions: NDArray[np.int64]) -> KeyValues:
        """A copy of the cache's rows numbered `rows` [k], with keys as the model first wrote them.

        `positions` [k] are the stream positions of these rows.
        """
        rows = self.slots_of(rows)
        tensors = [tensor.first_written(rows) for tensor in self._tensors]
        return KeyValues(positions, self._written_at[rows.numpy()], tensors)

    @torch.inference_mode()
    def rotated(self, rows: KeyValues, slots: Tensor) -> KeyValues:
        """The `rows` [k], rotated as attention would read them in the cache's slots `slots` [k].

        The keys of `rows` must be as first written.
        """
        new = torch.from_numpy(rows.positions) if self.absolute_positions else slots
        moves = CosSin(torch.from_numpy(rows.written_at), new)
        moved = list[Tensor]()
        for tensor, given in zip(self._tensors, rows.tensors, strict=True):
            rotation, cos_sin = tensor.rotation, moves.of(tensor.rotation, given.device)
            if rotation is not None and cos_sin is not None:
                given = rotation.apply(given, *cos_sin)
            moved.append(given)
        return KeyValues(rows.positions, rows.written_at, moved)

    @torch.inference_mode()
    def replace(self, rows: KeyValues) -> None:
        """Replace all rows of the cache by `rows` [n], which go into slots 0 to n - 1.

        The keys of `rows` must be as first written; they are rotated to their new positions.
        """
        count = len(rows)
        self._inserted = range(0)
        self.grow_to(count)
        self._stream[:count] = rows.positions
        written_at = torch.from_numpy(rows.written_at)
        moves = CosSin(written_at, self._rotary_positions(torch.arange(count)))
        for tensor, given in zip(self._tensors, rows.tensors, strict=True):
            device = tensor.device or given.device
            own = to_device(given, device)
            tensor.replace(self.cursor, own, moves.of(tensor.rotation, device))
        self._written_at[:count] = rows.written_at
        self.cursor.length = count

    @torch.inference_mode()
    def set_positions(self, *, absolute_positions: bool) -> None:
        """Set which rotary position keys have, and rotate all keys in the cache to it.

        It is the stream position if `absolute_positions` is true, otherwise the slot in the cache.
        """
        if absolute_positions == self.absolute_positions:
            return
        self.absolute_positions = absolute_positions
        if self.length:
            rows, inserted = torch.arange(self.length), self._inserted
            self._inserted = range(0)
            self.replace(self.first_written(rows, self._stream[: self.length].copy()))
            self._inserted = inserted

    @torch.no_grad()
    def grow_to(self, capacity: int) -> None:
        """Enlarge the cache's buffers to at least `capacity` rows; buffers never shrink."""
        if capacity <= self.capacity:
            return
        for name in ("_written_at", "_stream"):
            grown = np.zeros(capacity, np.int64)
            grown[: self.length] = getattr(self, name)[: self.length]
            setattr(self, name, grown)
        self._slots = np.arange(capacity)
        self.cursor.capacity = capacity
        for tensor in self._tensors:
            tensor.grow(self.cursor)

    def _rotary_positions(self, slots: Tensor) -> Tensor:
        """The rotary positions [n] of the keys in the cache's slots `slots` [n]."""
        if not self.absolute_positions:
            return slots
        return torch.from_numpy(self._stream[slots.numpy()].clip(min=0))

    def layer_keys(self, layer: int) -> Tensor:
        """The n cached keys of a layer, as attention reads them: a view [1, H, n, D]."""
        return self._view(layer, 0)

    @torch.inference_mode()
    def as_read(self, rows: Tensor) -> list[Tensor]:
        """The keys and values of the rows numbered `rows` [k], rotated as attention reads them.

        Returns tensors [H, k, D]: keys of layer 0, values of layer 0, keys of layer 1, and so on.
        """
        slots = self.slots_of(rows)
        views = [self._view(at, which)[0] for at in range(len(self.row_layers)) for which in (0, 1)]
        if len(slots) == self.length:
            return views
        return [one.index_select(1, slots.to(one.device)) for one in views]

    def layer_values(self, layer: int) -> Tensor:
        """The n cached values of a layer, as attention reads them: a view [1, H, n, D]."""
        return self._view(layer, 1)

    def _view(self, layer: int, which: int) -> Tensor:
        buffer = self.row_layers[layer].tensors[which].buffer
        if buffer is None:
            raise LookupError(f"layer {layer} has not been written yet")
        view: Tensor = buffer[0, :, :, : self.length]
        return view

    def _compact(self, tail: Tensor, start: int, old: Tensor, new: Tensor) -> None:
        moves = CosSin(old, new)
        slots = tail
        for tensor in self._tensors:
            if tensor.buffer is not None:
                device = tensor.buffer.device
                if slots.device != device:  # copied once, not for each layer of a device
                    slots = tail.to(device)
                tensor.compact(slots, start, moves.of(tensor.rotation, device))
