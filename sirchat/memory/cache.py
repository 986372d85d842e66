"""The key/value cache: buffers of fixed size, appended and compacted in place.

A `transformers.Cache`, so that every model with per-token keys and values can use it unpatched.
Each layer keeps its keys twice where they carry a rotation: as first written, and moved to their
present slot. A moved key is always computed from the first-written one, so keys never drift,
however often rows before them leave.

A block of foreign rows, each layer its own, may stand among the held ones for a while (`insert`);
held rows keep their numbers, which leave it out.

A forward pass writes behind the cursor and counts only after `commit`: an interrupted pass leaves
the cache as it was.
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

from sirchat.memory.rope import Rotation
from sirchat.memory.segments import Positions, Rows


@dataclass
class _Cursor:
    """What all layers share: rows held and rows there is room for."""

    length: int
    capacity: int


@dataclass(frozen=True)
class LayerRotation:
    """The rotations of a layer's two cached tensors; None for a tensor that does not move."""

    key: Rotation | None
    value: Rotation | None = None


class _Tensor:
    """One cached tensor of one layer, in a buffer [copies, 1, H, capacity, D].

    Copy 0 is what attention sees; the last copy holds the rows as first written. A tensor without a
    rotation never moves and has a single copy.
    """

    def __init__(self, rotation: Rotation | None) -> None:
        self.rotation = rotation
        self.buffer: Tensor | None = None

    def write(self, cursor: _Cursor, rows: Tensor) -> Tensor:
        """Write `rows` [1, H, m, D] behind the cursor; a view of all rows [1, H, n + m, D]."""
        count = rows.shape[2]
        end = cursor.length + count
        if self.buffer is None:
            self.buffer = self._allocate(cursor, rows)
        if end > self.buffer.shape[3]:  # else one row too many would be dropped in silence
            raise RuntimeError(f"the cache has room for {self.buffer.shape[3]} rows, not for {end}")
        # narrow, for this runs for every token and layer, and indexing costs twice the time
        self.buffer.narrow(3, cursor.length, count).copy_(rows)
        return self.attended.narrow(2, 0, end)

    def compact(self, tail: Tensor, start: int, turn: tuple[Tensor, Tensor] | None) -> None:
        """Move rows `tail` [t] to slots start.. and turn them by `turn` (cos, sin)."""
        if self.buffer is None:
            return
        end = start + len(tail)
        rows = self.buffer[-1].index_select(2, tail)  # [1, H, t, D]
        self.buffer[-1, :, :, start:end] = rows
        if self.rotation is not None and turn is not None:
            self.buffer[0, :, :, start:end] = self.rotation.apply(rows, *turn)

    def first_written(self, rows: Tensor) -> Tensor:
        """Rows `rows` [k] as first written: a copy [H, k, D]."""
        written = self._written()
        return written.index_select(2, rows.to(written.device))[0]

    def replace(self, cursor: _Cursor, rows: Tensor, turn: tuple[Tensor, Tensor] | None) -> None:
        """Hold `rows` [H, n, D], as first written, in slots 0.., turned by `turn` (cos, sin)."""
        count = rows.shape[1]
        if self.buffer is None:
            self._allocate(cursor, rows[None])
        written = self._written()
        written[0, :, :count] = rows
        if self.rotation is not None and turn is not None:
            self.attended[0, :, :count] = self.rotation.apply(written[0, :, :count], *turn)

    def insert(
        self, start: int, end: int, rows: Tensor, turn: tuple[Tensor, Tensor] | None
    ) -> None:
        """Put `rows` [H, k, D] into slots `start`.., before those up to `end`; `turn` is theirs.

        From then on they count as first written where they stand.
        """
        count, written = rows.shape[1], self._written()
        written[:, :, start + count : end + count] = written[:, :, start:end].clone()
        if self.rotation is not None and turn is not None:
            rows = self.rotation.apply(rows, *turn).to(rows.dtype)
            self.attended[0, :, start : start + count] = rows
        written[0, :, start : start + count] = rows

    def grow(self, cursor: _Cursor) -> None:
        """Reallocate for `cursor.capacity` rows, keeping those that are held."""
        if self.buffer is None:
            return
        copies, batch, heads, _, dims = self.buffer.shape
        grown = self.buffer.new_empty((copies, batch, heads, cursor.capacity, dims))
        grown[:, :, :, : cursor.length] = self.buffer[:, :, :, : cursor.length]
        self.buffer = self._use(grown)

    def _allocate(self, cursor: _Cursor, rows: Tensor) -> Tensor:
        """Buffers for rows like these [1, H, m, D]."""
        copies = 1 if self.rotation is None else 2
        shape = (copies, *rows.shape[:2], cursor.capacity, rows.shape[3])
        self.buffer = self._use(rows.new_empty(shape))
        return self.buffer

    def _written(self) -> Tensor:
        """The rows as first written [1, H, capacity, D]."""
        if self.buffer is None:
            raise LookupError("this layer has not been written yet")
        return self.buffer[-1]

    def _use(self, buffer: Tensor) -> Tensor:
        self.attended = buffer[0]  # [1, H, capacity, D]
        return buffer


class _BoundedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer's keys and values; sliding-window layers hold every row like the others."""

    is_sliding = False

    def __init__(self, cursor: _Cursor, rotation: LayerRotation) -> None:
        super().__init__()
        self.cursor = cursor
        self.tensors = (_Tensor(rotation.key), _Tensor(rotation.value))

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
    """Keys and values of the held rows, slot i for row i, in every layer.

    Args:
        rotations: one entry per layer.
        capacity: rows there is room for.
    """

    in_stream = False
    """Keys stand where they stand in the stream, and not, close together, in the cache."""

    def __init__(self, rotations: list[LayerRotation], capacity: int) -> None:
        self._cursor = _Cursor(0, capacity)
        self._written_at = np.zeros(capacity, np.int64)
        self._stream = np.zeros(capacity, np.int64)
        self._slots = np.arange(capacity)
        self._foreign = range(0)
        super().__init__(layers=[_BoundedLayer(self._cursor, rotation) for rotation in rotations])

    @property
    def length(self) -> int:
        """Rows that attention sees, foreign ones included."""
        return self._cursor.length

    @property
    def foreign(self) -> int:
        """Rows that were inserted."""
        return len(self._foreign)

    @property
    def capacity(self) -> int:
        """Rows there is room for without reallocating."""
        return self._cursor.capacity

    @property
    def _tensors(self) -> list[_Tensor]:
        """Key and value of each layer."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, in bytes."""
        buffers = [tensor.buffer for tensor in self._tensors]
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

    def commit(self, count: int, positions: Positions | range | None = None) -> None:
        """Count the `count` rows that a forward pass has written behind the cursor.

        They stand at these `positions` of the stream; without any, behind the last row.
        """
        start = self._cursor.length
        if positions is None:
            first = int(self._stream[start - 1]) + 1 if start else 0
            positions = range(first, first + count)
        end = start + count
        self._stream[start:end] = positions
        places = self._stream if self.in_stream else self._slots
        self._written_at[start:end] = places[start:end]
        self._cursor.length = end

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Hold exactly these rows [k] (int64, ascending), moved to slots 0..k-1."""
        if self.foreign:
            before = int((rows < self._foreign.start).sum())
            foreign = torch.arange(self._foreign.start, self._foreign.stop)
            slots = self.slots_of(rows)
            rows = torch.cat((slots[:before], foreign, slots[before:]))
            self._foreign = range(before, before + len(foreign))
        self._keep_slots(rows)

    @torch.inference_mode()
    def insert(self, start: int, layers: list[Rows]) -> None:
        """Let foreign rows, `layers[i]` in layer i, stand before row `start` until `remove`."""
        self.remove()
        end, count = self.length, len(layers[0])
        self.reserve(end + count)
        slots = torch.arange(start, start + count)
        for layer, rows in zip(self.layers, layers, strict=True):
            new = torch.from_numpy(rows.positions) if self.in_stream else slots
            turns = _Turns(torch.from_numpy(rows.written_at), new)
            for tensor, given in zip(layer.tensors, rows.tensors, strict=True):
                device = tensor.attended.device
                tensor.insert(start, end, given.to(device), turns.of(tensor.rotation, device))
        for one in (self._written_at, self._stream):
            one[start + count : end + count] = one[start:end].copy()
        self._written_at[start : start + count] = slots.numpy()
        self._stream[start : start + count] = -1  # each layer's are others
        self._foreign = range(start, start + count)
        self._cursor.length = end + count
        moved = torch.arange(start + count, end + count)
        written_at = torch.from_numpy(self._written_at[start + count : end + count])
        self._compact(moved, start + count, written_at, self._targets(moved))

    @torch.inference_mode()
    def remove(self) -> None:
        """Let the foreign rows go."""
        rows = torch.arange(self.length - self.foreign)
        slots, self._foreign = self.slots_of(rows), range(0)
        if len(slots) < self.length:
            self._keep_slots(slots)

    def slots_of(self, rows: Tensor) -> Tensor:
        """Where held rows [k] stand among all that attention sees."""
        if not self._foreign:
            return rows
        return rows + (rows >= self._foreign.start) * self.foreign

    def _keep_slots(self, rows: Tensor) -> None:
        slots = torch.arange(len(rows))
        moved = (rows != slots).nonzero()
        start = int(moved[0, 0]) if len(moved) else len(rows)
        tail = rows[start:]
        if len(tail):
            written_at = self._written_at[tail.numpy()]
            self._stream[start : len(rows)] = self._stream[tail.numpy()]
            new = self._targets(slots[start:])
            self._compact(tail, start, torch.from_numpy(written_at), new)
            self._written_at[start : len(rows)] = written_at
        self._cursor.length = len(rows)

    @torch.inference_mode()
    def first_written(self, rows: Tensor, positions: NDArray[np.int64]) -> Rows:
        """Rows `rows` [k] as first written, which stand at these stream positions: a copy."""
        rows = self.slots_of(rows)
        tensors = [tensor.first_written(rows) for tensor in self._tensors]
        return Rows(positions, self._written_at[rows.numpy()], tensors)

    @torch.inference_mode()
    def replace(self, rows: Rows) -> None:
        """Hold exactly `rows`, in this order, and turn their keys to slots 0..n-1."""
        count = len(rows)
        self._foreign = range(0)
        self.reserve(count)
        self._stream[:count] = rows.positions
        written_at = torch.from_numpy(rows.written_at)
        turn = _Turns(written_at, self._targets(torch.arange(count)))
        for tensor, given in zip(self._tensors, rows.tensors, strict=True):
            device = given.device if tensor.buffer is None else tensor.buffer.device
            tensor.replace(self._cursor, given.to(device), turn.of(tensor.rotation, device))
        self._written_at[:count] = rows.written_at
        self._cursor.length = count

    @torch.inference_mode()
    def place(self, *, in_stream: bool) -> None:
        """Let keys stand where they stand in the stream, or close together in the cache."""
        if in_stream != self.in_stream:
            self.in_stream = in_stream
            rows, foreign = torch.arange(self.length), self._foreign
            self._foreign = range(0)
            self.replace(self.first_written(rows, self._stream[: self.length].copy()))
            self._foreign = foreign

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows; buffers never shrink."""
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

    def _targets(self, slots: Tensor) -> Tensor:
        """Where the keys of these slots [n] stand: the positions that attention takes them for."""
        if not self.in_stream:
            return slots
        return torch.from_numpy(self._stream[slots.numpy()].clip(min=0))

    def layer_keys(self, layer: int) -> Tensor:
        """What attention sees in a layer's key slot: [1, H, n, D] (a view)."""
        return self._view(layer, 0)

    def layer_values(self, layer: int) -> Tensor:
        """What attention sees in a layer's value slot: [1, H, n, D] (a view)."""
        return self._view(layer, 1)

    def _view(self, layer: int, slot: int) -> Tensor:
        buffer = self.layers[layer].tensors[slot].buffer
        if buffer is None:
            raise LookupError(f"layer {layer} has not been written yet")
        view: Tensor = buffer[0, :, :, : self.length]
        return view

    def _compact(self, tail: Tensor, start: int, old: Tensor, new: Tensor) -> None:
        turns = _Turns(old, new)
        on_device: dict[torch.device, Tensor] = {}
        for tensor in self._tensors:
            if tensor.buffer is not None:
                device = tensor.buffer.device
                index = on_device.setdefault(device, tail.to(device))
                tensor.compact(index, start, turns.of(tensor.rotation, device))


class _Turns:
    """Cosines and sines that turn keys from slots `old` [n] to `new` [n].

    Computed once for each set of frequencies and device, not for each layer.
    """

    def __init__(self, old: Tensor, new: Tensor) -> None:
        self._slots = old, new
        self._known: list[tuple[Rotation, torch.device, tuple[Tensor, Tensor]]] = []

    def of(self, rotation: Rotation | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine [n, d/2] on `device`; None where nothing turns."""
        if rotation is None:
            return None
        for other, where, turn in self._known:
            if where == device and other.same_angles(rotation):
                return turn
        cos, sin = rotation.turn(*self._slots)
        self._known.append((rotation, device, (cos.to(device), sin.to(device))))
        return self._known[-1][2]
