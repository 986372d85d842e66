"""The KV cache: buffers to which rows are appended, and from which any row can be evicted.

A row is the keys and values of one token in all layers, a slot its place in the buffers. Keys are
kept as first written, too: a row that moves is rotated from those, so errors never add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.key_values import CacheState, KeyValues, Positions, to_device
from sirchat.memory.rope import CosSin, Rotation

# A layer's kind: whether it has keys and values, and how many recurrent or convolution states.
LayerKind = tuple[bool, int]


@dataclass(frozen=True)
class LayerRotation:
    """The rotary position embeddings of one layer's keys and values; None: not rotated."""

    key: Rotation | None
    value: Rotation | None = None


@dataclass
class Cursor:
    """Numbers of cache slots, which are the same for all layers."""

    length: int  # in use
    capacity: int  # allocated
    written: int = 0  # by the last forward pass
    # int64 [1] on the device: the slot to which a pass writes its row, which then reads all slots.
    slot: Tensor | None = None


class BoundedCache:
    """A KV cache from which any row can be evicted.

    Row number i is in slot i of every layer, unless `insert` put extra rows before it, different
    ones in each layer. A forward pass writes its rows after the last one; only `commit` makes them
    held. `layers` are all layers of the model, `row_layers` those with keys and values, which layer
    numbers count and which `rotations` and `devices` describe. Without `dtype` and `devices`, those
    of the first rows written are used.
    """

    # Whether recurrent or convolution layers read only one token in a forward pass.
    reads_singly = False
    # Whether a key's rotary position is its token's index in the stream; else it is its slot.
    absolute_positions = False

    def __init__(
        self,
        rotations: list[LayerRotation],
        capacity: int,
        dtype: torch.dtype | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        self.cursor = Cursor(0, capacity)
        self.dtype = dtype
        self._written_at = np.zeros(capacity, np.int64)
        self._stream = np.zeros(capacity, np.int64)
        self._slots = np.arange(capacity)
        self._inserted = range(0)  # slots of the inserted rows
        where: Sequence[torch.device | None] = devices or [None] * len(rotations)
        self.layers = self._new_layers(
            [
                (self.cursor, rotation, dtype, device)
                for rotation, device in zip(rotations, where, strict=True)
            ]
        )
        self.row_layers = [layer for layer in self.layers if isinstance(layer, RowLayer)]
        # Keys of layer 0, values of layer 0, keys of layer 1, and so on.
        self._tensors = [tensor for layer in self.row_layers for tensor in layer.tensors]
        self._with_state = [layer for layer in self.layers if isinstance(layer, HoldsState)]
        self._state: CacheState = tuple({} for _ in self._with_state)
        self._is_clean = True  # whether no pass has begun since the last commit

    def _new_layers(self, rows: Sequence[RowArguments]) -> list[Any]:
        """The empty layers; `rows` has the arguments of each `RowLayer`."""
        return [RowLayer(*arguments) for arguments in rows]

    @property
    def length(self) -> int:
        """Number of slots that attention reads: held rows and the extra rows of `insert`."""
        return self.cursor.length

    @property
    def inserted_count(self) -> int:
        """Number of extra rows that `insert` has put into each layer."""
        return len(self._inserted)

    @property
    def capacity(self) -> int:
        """Number of slots in the buffers."""
        return self.cursor.capacity

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent or convolution layers."""
        return bool(self._with_state)

    @property
    def state(self) -> CacheState:
        """The state of recurrent and convolution layers, which evictions do not change.

        Assign an earlier value to restore it; () stands for the state before the first token.
        """
        return self._state

    @state.setter
    def state(self, state: CacheState) -> None:
        self._state = state or tuple({} for _ in self._with_state)
        self._restore_state()

    def begin_pass(self) -> None:
        """Undo what a pass that was not committed did to the states; call it before each pass."""
        if not self._is_clean:
            self._restore_state()
        self._is_clean = not self._with_state

    @property
    def nbytes(self) -> int:
        """Size of all buffers and states, in bytes."""
        return sum(self.bytes_by_device().values())

    @property
    def state_nbytes(self) -> int:
        """Size of the states of recurrent and convolution layers, in bytes."""
        return sum(tensor.nbytes for layer in self._state for tensor in layer.values())

    def bytes_by_device(self) -> Counter[torch.device]:
        """Size of buffers and states on each device, in bytes."""
        buffers = [tensor.buffer for tensor in self._tensors]
        states = [tensor for layer in self._state for tensor in layer.values()]
        sizes = Counter[torch.device]()
        for tensor in (*buffers, *states):
            if tensor is not None:
                sizes[tensor.device] += tensor.nbytes
        return sizes

    @property
    def devices(self) -> list[torch.device]:
        """The device of each layer's keys and values, but for layers not yet written."""
        devices = [layer.tensors[0].device for layer in self.row_layers]
        return [device for device in devices if device is not None]

    def commit(self, count: int, positions: int | Positions | None = None) -> None:
        """Hold the `count` new rows that a forward pass has written.

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
        """Remove all rows but those numbered `rows` [k] (int64, ascending) and inserted ones."""
        if self._inserted:
            before = int((rows < self._inserted.start).sum())
            inserted = torch.arange(self._inserted.start, self._inserted.stop)
            slots = self.slots_of(rows)
            rows = torch.cat((slots[:before], inserted, slots[before:]))
            self._inserted = range(before, before + len(inserted))
        self._keep_slots(rows)

    @torch.inference_mode()
    def insert(self, start: int, layers: list[KeyValues]) -> None:
        """Put extra rows, `layers[i]` into layer i, before row number `start`.

        All layers get equally many; those inserted earlier are removed first.
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
                cos_sin = moves.of(tensor.rotation, device)
                tensor.insert(start, end, to_device(given, device), cos_sin)
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
        """Remove the extra rows that `insert` has put in, if any."""
        rows = torch.arange(self.length - self.inserted_count)
        slots, self._inserted = self.slots_of(rows), range(0)
        if len(slots) < self.length:
            self._keep_slots(slots)

    def slots_of(self, rows: Tensor) -> Tensor:
        """The slots [k] of the rows numbered `rows` [k]."""
        if not self._inserted:
            return rows
        return rows + (rows >= self._inserted.start) * self.inserted_count

    @torch.inference_mode()
    def first_written(self, rows: Tensor, positions: NDArray[np.int64]) -> KeyValues:
        """A copy of the rows numbered `rows` [k], with keys as the model first wrote them.

        `positions` [k] are their stream positions.
        """
        rows = self.slots_of(rows)
        tensors = [tensor.first_written(rows) for tensor in self._tensors]
        return KeyValues(positions, self._written_at[rows.numpy()], tensors)

    @torch.inference_mode()
    def rotated(self, rows: KeyValues, slots: Tensor) -> KeyValues:
        """First-written `rows` [k], rotated as attention would read them in `slots` [k]."""
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
        """Replace all rows by first-written `rows` [n], rotated to slots 0 to n - 1."""
        count = len(rows)
        self._inserted = range(0)
        self.grow_to(count)
        self._stream[:count] = rows.positions
        written_at = torch.from_numpy(rows.written_at)
        moves = CosSin(written_at, self._rotary_positions(torch.arange(count)))
        for tensor, given in zip(self._tensors, rows.tensors, strict=True):
            device = tensor.device or given.device
            cos_sin = moves.of(tensor.rotation, device)
            tensor.replace(self.cursor, to_device(given, device), cos_sin)
        self._written_at[:count] = rows.written_at
        self.cursor.length = count

    @torch.inference_mode()
    def set_positions(self, *, absolute_positions: bool) -> None:
        """Rotate all keys, also later ones, to stream positions or to slots."""
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
        """Enlarge the buffers to at least `capacity` slots; they never shrink."""
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

    @torch.inference_mode()
    def as_read(self, rows: Tensor) -> list[Tensor]:
        """Keys and values [H, k, D] of the rows numbered `rows` [k], as attention reads them.

        The list has the keys of layer 0, its values, the keys of layer 1, and so on.
        """
        slots = self.slots_of(rows)
        views = [self._view(at, which)[0] for at in range(len(self.row_layers)) for which in (0, 1)]
        if len(slots) == self.length:
            return views
        return [view.index_select(1, slots.to(view.device)) for view in views]

    def layer_keys(self, layer: int) -> Tensor:
        """The n cached keys of a layer, as attention reads them: a view [1, H, n, D]."""
        return self._view(layer, 0)

    def layer_values(self, layer: int) -> Tensor:
        """The n cached values of a layer, as attention reads them: a view [1, H, n, D]."""
        return self._view(layer, 1)

    def _view(self, layer: int, which: int) -> Tensor:
        buffer = self.row_layers[layer].tensors[which].buffer
        if buffer is None:
            raise LookupError(f"layer {layer} has not been written yet")
        view: Tensor = buffer[0, :, :, : self.length]
        return view

    @torch.no_grad()
    def _restore_state(self) -> None:
        self.cursor.written = 0
        for layer, state in zip(self._with_state, self._state, strict=True):
            layer.set_state(state)
        self._is_clean = True

    def _rotary_positions(self, slots: Tensor) -> Tensor:
        """The rotary positions [n] of the keys in `slots` [n]."""
        if not self.absolute_positions:
            return slots
        return torch.from_numpy(self._stream[slots.numpy()].clip(min=0))

    def _keep_slots(self, kept: Tensor) -> None:
        slots = torch.arange(len(kept))
        moved = (kept != slots).nonzero()
        start = int(moved[0, 0]) if len(moved) else len(kept)
        tail = kept[start:]
        if len(tail):
            written_at = self._written_at[tail.numpy()]
            self._stream[start : len(kept)] = self._stream[tail.numpy()]
            new = self._rotary_positions(slots[start:])
            self._compact(tail, start, torch.from_numpy(written_at), new)
            self._written_at[start : len(kept)] = written_at
        self.cursor.length = len(kept)

    def _compact(self, tail: Tensor, start: int, old: Tensor, new: Tensor) -> None:
        """Move the slots `tail` [t] to those from `start` on, rotated from `old` to `new`."""
        moves = CosSin(old, new)
        on_device: dict[torch.device, Tensor] = {}
        for tensor in self._tensors:
            if tensor.buffer is not None:
                device = tensor.buffer.device
                index = on_device.setdefault(device, tail.to(device))
                tensor.compact(index, start, moves.of(tensor.rotation, device))


class CachedTensor:
    """The keys or the values of one layer, in a buffer [copies, 1, H, capacity, D].

    With a `rotation`, copy 0 has the rows as attention reads them, copy 1 as first written.
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
        """Write m new `rows` [1, H, m, D] after the n rows in use.

        Returns all rows [1, H, n + m, D] as attention reads them, in the type of `rows`: a view, or
        a copy if the buffer has another type.
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

    def write_at(self, slot: Tensor, row: Tensor) -> Tensor:
        """Write one row [1, H, 1, D] to `slot` [1]; returns all slots, those not in use, too."""
        assert self.buffer is not None
        rows = row.to(self.buffer.dtype).expand(len(self.buffer), *row.shape)
        self.buffer.index_copy_(3, slot, rows)
        return self.attended.to(row.dtype)

    def compact(self, tail: Tensor, start: int, cos_sin: tuple[Tensor, Tensor] | None) -> None:
        """Move the rows in the slots `tail` [t] to those from `start` on, and rotate them."""
        if self.buffer is None:
            return
        end = start + len(tail)
        rows = self.buffer[-1][:, :, tail]  # [1, H, t, D]; index_select takes twice as long
        self.buffer[-1, :, :, start:end] = rows
        if self.rotation is not None and cos_sin is not None:
            self.buffer[0, :, :, start:end] = self.rotation.apply(rows, *cos_sin)

    def first_written(self, slots: Tensor) -> Tensor:
        """A copy [H, k, D] of the rows in `slots` [k], as first written."""
        if self.buffer is None:
            raise LookupError("this layer has not been written yet")
        return self.buffer[-1].index_select(2, slots.to(self.buffer.device))[0]

    def replace(self, cursor: Cursor, rows: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> None:
        """Write first-written `rows` [H, n, D] to slots 0 to n - 1, and rotate them."""
        count = rows.shape[1]
        if self.buffer is None:
            self.buffer = self._allocate(cursor, rows[None])
        written = self.buffer[-1]
        written[0, :, :count] = rows
        if self.rotation is not None and cos_sin is not None:
            self.attended[0, :, :count] = self.rotation.apply(written[0, :, :count], *cos_sin)

    def insert(
        self, start: int, end: int, rows: Tensor, cos_sin: tuple[Tensor, Tensor] | None
    ) -> None:
        """Insert `rows` [H, k, D], rotated, before slot `start`, also as first-written ones.

        The first-written rows in slots `start` to `end` - 1 move up by k; the caller rotates them.
        """
        assert self.buffer is not None
        count, written = rows.shape[1], self.buffer[-1]
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
        self.buffer, self.attended = grown, grown[0]

    def _allocate(self, cursor: Cursor, rows: Tensor) -> Tensor:
        copies = 1 if self.rotation is None else 2
        shape = (copies, *rows.shape[:2], cursor.capacity, rows.shape[3])
        self.device = self.device or rows.device
        buffer = rows.new_empty(shape, dtype=self._dtype or rows.dtype, device=self.device)
        self.attended = buffer[0]  # [1, H, capacity, D]
        return buffer


RowArguments = tuple[Cursor, LayerRotation, torch.dtype | None, torch.device | None]


class RowLayer:
    """The keys and values of one layer; one with a sliding window stores as many as any other."""

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
        """Write m new keys and values [1, H, m, D]; returns all of each, [1, H, n + m, D]."""
        keys, values = self.tensors
        if (slot := self.cursor.slot) is not None:
            return keys.write_at(slot, key_states), values.write_at(slot, value_states)
        self.cursor.written = key_states.shape[2]
        return keys.write(self.cursor, key_states), values.write(self.cursor, value_states)


@runtime_checkable
class HoldsState(Protocol):
    """Protocol of a cache layer with recurrent or convolution states."""

    def copy_state(self) -> dict[tuple[str, int], Tensor]:
        """A copy of the states written so far, by kind (`conv`, `recurrent`) and number."""

    def set_state(self, state: dict[tuple[str, int], Tensor]) -> None:
        """Replace the layer's states by a copy of `state`."""


def layer_numbers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """Map the model's numbers of layers with keys and values to their numbers among these."""
    with_rows = (number for number, (has_rows, _) in enumerate(kinds) if has_rows)
    return {number: at for at, number in enumerate(with_rows)}
