"""The KV cache: rows are appended to it, and any row can be evicted.

A row is the keys and values of one token in all layers. A slot is a row's place in the buffers.
Keys are also kept as first written. A row that moves is rotated from those, so errors never add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.key_values import CacheState, KeyValues, Positions, to_device
from sirchat.memory.rope import Rotation

_MAX_ROTATED_BYTES = 2**26  # bytes of keys in float32 that are rotated at once, but on a CPU

# Cosines and sines, [2, n, d/2], that rotate n rows of a tensor, by its number in `tensors`.
CosSinByTensor = Mapping[int, Tensor]

# A layer's kind: whether it has keys and values, and how many recurrent or convolution states.
LayerKind = tuple[bool, int]

Store = Callable[[KeyValues], object]  # gets rows that leave the cache


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


class CachedTensor:
    """The keys or the values of one layer, in a buffer [copies, 1, H, capacity, D].

    With a `rotation`, copy 0 has the rows as attention reads them, copy 1 as first written.
    """

    def __init__(self, rotation: Rotation | None, device: torch.device | None) -> None:
        self.rotation, self.device = rotation, device
        self.buffer: Tensor | None = None  # until the first rows are written

    def use(self, buffer: Tensor) -> None:
        self.buffer, self.device = buffer, buffer.device
        self.attended = buffer[0]  # [1, H, capacity, D]

    def write(self, cursor: Cursor, rows: Tensor) -> Tensor:
        """Write m new `rows` [1, H, m, D] after the n rows in use; returns all, [1, H, n + m, D].

        The result has rows as attention reads them, in the dtype of `rows`; it is a view, or a copy
        if the buffer has another dtype.
        """
        assert self.buffer is not None
        count = rows.shape[2]
        end = cursor.length + count
        if end > self.buffer.shape[3]:  # `narrow` would fail too, but not name the limit
            raise RuntimeError(f"the cache has room for {self.buffer.shape[3]} rows, not for {end}")
        # narrow takes half the time of indexing, and this runs for every token and layer
        self.buffer.narrow(3, cursor.length, count).copy_(rows)
        return self.attended.narrow(2, 0, end).to(rows.dtype)

    def write_to_slot(self, slot: Tensor, row: Tensor) -> Tensor:
        """Write one row [1, H, 1, D] to `slot` [1]; returns all slots, in use or not."""
        assert self.buffer is not None
        rows = row.to(self.buffer.dtype).expand(len(self.buffer), *row.shape)
        self.buffer.index_copy_(3, slot, rows)
        return self.attended.to(row.dtype)


class RowBuffers:
    """Neighbouring layers' buffers: one tensor, `pool`, if they agree, else one for each tensor.

    Layers agree if they have the same shape, dtype, device and rotated dimensions of keys (with any
    frequencies), and no rotated values. `first` is the number of the first layer.
    """

    def __init__(
        self,
        cursor: Cursor,
        rotations: Sequence[LayerRotation],
        dtype: torch.dtype | None,
        device: torch.device | None,
        first: int = 0,
    ) -> None:
        self.cursor, self._dtype, self._first = cursor, dtype, first
        # [L, 3, H, capacity, D]: keys as attention reads them, keys as first written, values
        self.pool: Tensor | None = None
        self.layers = [
            (CachedTensor(rotation.key, device), CachedTensor(rotation.value, device))
            for rotation in rotations
        ]
        # Keys of the first layer, its values, keys of the second layer, and so on.
        self.tensors = [tensor for layer in self.layers for tensor in layer]
        keys = [rotation.key for rotation in rotations if rotation.key]
        layouts = {(len(key.inv_freq), key.interleaved, key.offset) for key in keys}
        turns_values = any(rotation.value for rotation in rotations)
        self._can_pool = len(keys) == len(rotations) and not turns_values and len(layouts) == 1
        self._kinds = set[tuple[int, int, torch.dtype, torch.device]]()  # H, D and so on, so far

    @property
    def length(self) -> int:
        return self.cursor.length

    @property
    def capacity(self) -> int:
        return self.cursor.capacity

    def allocate(self, layer: int, *rows: Tensor) -> None:
        """Make a layer's buffers for keys and values like `rows`, each [1, H, m, D]."""
        tensors, capacity = self.layers[layer], self.cursor.capacity
        kinds = [
            (one.shape[1], one.shape[3], self._dtype or one.dtype, tensor.device or one.device)
            for tensor, one in zip(tensors, rows, strict=True)
        ]
        self._kinds.update(kinds)
        if self._can_pool and len(self._kinds) == 1:
            if self.pool is None:
                heads, dims, dtype, device = kinds[0]
                shape = (len(self.layers), 3, heads, capacity, dims)
                self.pool = torch.empty(shape, dtype=dtype, device=device)
            self._use_pool(layer)
            return
        for tensor in self.tensors if self.pool is not None else ():
            if tensor.buffer is not None:
                tensor.use(tensor.buffer.clone())
        self.pool = None
        for tensor, (heads, dims, dtype, device) in zip(tensors, kinds, strict=True):
            copies = 1 if tensor.rotation is None else 2
            shape = (copies, 1, heads, capacity, dims)
            tensor.use(torch.empty(shape, dtype=dtype, device=device))

    def resize(self) -> None:
        """Change the buffers to exactly `cursor.capacity` rows."""
        if self.pool is not None:
            self.pool = self._resized(self.pool)
        for layer, tensors in enumerate(self.layers):
            for tensor in tensors:
                if self.pool is None and tensor.buffer is not None:
                    tensor.use(self._resized(tensor.buffer))
            if self.pool is not None and tensors[0].buffer is not None:
                self._use_pool(layer)

    def parts(self, count: int) -> list[RowBuffer]:
        """The buffers of all written tensors, or parts of the pool for moving `count` rows."""
        first = 2 * self._first
        if self.pool is None:
            return [
                RowBuffer(tensor.buffer.transpose(0, 1), tensor.rotation, range(number, number + 1))
                for number, tensor in enumerate(self.tensors, first)
                if tensor.buffer is not None
            ]
        heads, _, dims = self.pool.shape[2:]
        # On a CPU, whose caches hold one layer's rows, a part has one layer.
        is_cpu, rotation = self.pool.device.type == "cpu", self.tensors[0].rotation
        step = 1 if is_cpu else max(1, _MAX_ROTATED_BYTES // max(1, 4 * heads * count * dims))
        starts = range(first, first + len(self.tensors), 2 * step)
        return [
            RowBuffer(rows, rotation, range(start, start + 2 * len(rows)))
            for start, rows in zip(starts, torch.split(self.pool, step), strict=True)
        ]

    def _use_pool(self, layer: int) -> None:
        assert self.pool is not None
        for tensor, copies in zip(self.layers[layer], (slice(0, 2), slice(2, 3)), strict=True):
            tensor.use(self.pool[layer, copies, None])

    def _resized(self, rows: Tensor) -> Tensor:  # [..., capacity, D]
        resized = rows.new_empty((*rows.shape[:-2], self.cursor.capacity, rows.shape[-1]))
        count = min(rows.shape[-2], self.cursor.capacity)  # also rows that are not held yet
        resized[..., :count, :] = rows[..., :count, :]
        return resized


class RowBuffer(NamedTuple):
    """Some layers of the pool, or one tensor's buffer."""

    rows: Tensor  # [n, copies, H, capacity, D]; with a rotation, copy 0 is copy 1 as it is read
    rotation: Rotation | None  # of the first layer; the others may have other frequencies
    numbers: range  # of the tensors, c for each layer

    @property
    def written(self) -> Tensor:
        """The rows as first written, [n, c, H, capacity, D]."""
        return self.rows if self.rotation is None else self.rows[:, 1:]

    def copy_rows(self, slots: Tensor) -> Tensor:
        """A copy [n, c, H, t, D] of the first-written rows in `slots` [t]."""
        rows = self.written
        if len(rows) > 1:
            return rows.index_select(3, slots)
        # torch is several times as fast with three dimensions
        copied = rows.flatten(0, 2).index_select(1, slots)
        return copied.view(*rows.shape[:3], *copied.shape[1:])

    def write(self, start: int, rows: Tensor, cos_sin: CosSinByTensor) -> None:
        """Write first-written rows to the slots from `start` on, and rotate them."""
        rows, end = rows.to(self.rows.dtype), start + rows.shape[3]
        self.written[:, :, :, start:end] = rows
        if self.rotation is not None:
            first, *others = [cos_sin[number] for number in self.numbers[:: rows.shape[1]]]
            is_same = all(other is first for other in others)
            turn = first if is_same else torch.stack([first, *others], 1)[:, :, None]
            self.rows[:, 0, :, start:end] = self.rotation.apply(rows[:, 0], *turn)


class BoundedCache:
    """A KV cache from which any row can be evicted.

    Row i is in slot i of every layer. A forward pass writes its rows after the last one; only
    `commit` makes them held. Layer numbers count the layers with keys and values, which `rotations`
    and `devices` describe. The first rows written set a missing `dtype` and missing `devices`.
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
        where: Sequence[torch.device | None] = devices or [None] * len(rotations)
        self.buffers = list[RowBuffers]()  # of neighbouring layers on one device
        for device, run in groupby(range(len(where)), where.__getitem__):
            first, *others = run
            alike = rotations[first : first + len(others) + 1]
            self.buffers.append(RowBuffers(self.cursor, alike, dtype, device, first))
        places = [(rows, number) for rows in self.buffers for number in range(len(rows.layers))]
        self.layers = self._new_layers(places)
        self.row_layers = [layer for layer in self.layers if isinstance(layer, RowLayer)]
        # Keys of layer 0, values of layer 0, keys of layer 1, and so on.
        self.tensors = [tensor for rows in self.buffers for tensor in rows.tensors]
        # Numbers of the tensors that have the same frequencies, by the first one's rotation.
        self._tensors_by_rotation = dict[Rotation, list[int]]()
        for number, tensor in enumerate(self.tensors):
            if tensor.rotation is not None:
                same = filter(tensor.rotation.has_same_angles, self._tensors_by_rotation)
                self._tensors_by_rotation.setdefault(next(same, tensor.rotation), []).append(number)
        self._stateful_layers = [layer for layer in self.layers if isinstance(layer, StatefulLayer)]
        self._state: CacheState = tuple({} for _ in self._stateful_layers)
        self._is_clean = True  # whether no pass has begun since the last commit

    def _new_layers(self, rows: Sequence[RowArguments]) -> list[Any]:
        """The empty layers; `rows` has the arguments of each `RowLayer`."""
        return [RowLayer(*arguments) for arguments in rows]

    @property
    def length(self) -> int:
        return self.cursor.length

    @property
    def capacity(self) -> int:
        """Number of slots in the buffers."""
        return self.cursor.capacity

    @property
    def pool(self) -> Tensor | None:
        """[L, 3, H, capacity, D]: keys as attention reads them, keys as first written, values.

        None before the first rows, and if the layers differ, or are on several devices, where
        `buffers` have pools. The tensor is new when the capacity changes.
        """
        return self.buffers[0].pool if len(self.buffers) == 1 else None

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent or convolution layers."""
        return bool(self._stateful_layers)

    @property
    def state(self) -> CacheState:
        """The state of recurrent and convolution layers, which evictions do not change.

        Assign an earlier value to restore it; () is the state before the first token.
        """
        return self._state

    @state.setter
    def state(self, state: CacheState) -> None:
        self._state = state or tuple({} for _ in self._stateful_layers)
        self._restore_state()

    def begin_pass(self) -> None:
        """Before each pass, undo the changes of states by a pass that was not committed."""
        if not self._is_clean:
            self._restore_state()
        self._is_clean = not self._stateful_layers

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_device().values())

    @property
    def state_nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self._state for tensor in layer.values())

    def bytes_by_device(self) -> Counter[torch.device]:
        buffers = [tensor.buffer for tensor in self.tensors]
        states = [tensor for layer in self._state for tensor in layer.values()]
        sizes = Counter[torch.device]()
        for tensor in (*buffers, *states):
            if tensor is not None:
                sizes[tensor.device] += tensor.nbytes
        return sizes

    @property
    def devices(self) -> list[torch.device]:
        """The device of each layer that has been written."""
        devices = [layer.tensors[0].device for layer in self.row_layers]
        return [device for device in devices if device is not None]

    def commit(self, count: int, positions: int | Positions | None = None) -> None:
        """Hold the `count` new rows that a forward pass has written.

        `positions` [count] are their stream positions, or the first of a run of positions; by
        default they continue after the last row.
        """
        start = self.cursor.length
        end = start + count
        if self._stateful_layers:
            if count != self.cursor.written:
                raise RuntimeError("a pass over layers with a state is committed as a whole")
            with torch.no_grad():
                self._state = tuple(layer.copy_state() for layer in self._stateful_layers)
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
    def keep(self, rows: Tensor, leaving: Tensor | None = None, store: Store | None = None) -> None:
        """Remove all rows but those numbered `rows` [k] (int64, ascending).

        Before that, `store` gets a copy of the rows numbered `leaving`, as first written.
        """
        moved = (rows != torch.arange(len(rows))).nonzero()
        start = int(moved[0, 0]) if len(moved) else len(rows)
        self._move(rows[start:], start, rows[:0] if leaving is None else leaving, store)
        self.cursor.length = len(rows)

    @torch.inference_mode()
    def first_written_rows(self, rows: Tensor, positions: NDArray[np.int64]) -> KeyValues:
        """A copy of the rows numbered `rows` [k], with keys as the model first wrote them.

        `positions` [k] are their stream positions.
        """
        found = list[KeyValues]()
        self.layer_values(len(self.row_layers) - 1)  # an error before the first pass
        self._move(rows[:0], 0, rows, found.append)
        return replace(found[0], positions=positions)

    @torch.inference_mode()
    def rotated(self, rows: KeyValues, slots: Tensor) -> KeyValues:
        """First-written `rows` [k], rotated as attention would read them in `slots` [k]."""
        moved, cos_sin = list(rows.tensors), self._cos_sin(rows.written_at, slots, rows.positions)
        on_device = to_device(list(cos_sin.values()), moved[0].device)
        for number, turn in zip(cos_sin, on_device, strict=True):
            if (rotation := self.tensors[number].rotation) is not None:
                moved[number] = rotation.apply(moved[number], *turn)
        return KeyValues(rows.positions, rows.written_at, moved)

    @torch.inference_mode()
    def replace(self, rows: KeyValues) -> None:
        """Replace all rows by first-written `rows` [n], rotated to slots 0 to n - 1."""
        count = len(rows)
        self.grow_to(count)
        for number, layer in enumerate(self.row_layers):
            if layer.tensors[0].buffer is None:
                layer.allocate(*(one[None] for one in rows.tensors[2 * number : 2 * number + 2]))
        cos_sin = self._cos_sin(rows.written_at, torch.arange(count), rows.positions)
        self._put(0, rows.tensors, cos_sin)
        self._stream[:count], self._written_at[:count] = rows.positions, rows.written_at
        self.cursor.length = count

    @torch.inference_mode()
    def set_positions(self, *, absolute_positions: bool) -> None:
        """Rotate all keys, now and later, to stream positions or else to slots."""
        if absolute_positions == self.absolute_positions:
            return
        self.absolute_positions = absolute_positions
        if self.length:
            rows = torch.arange(self.length)
            self.replace(self.first_written_rows(rows, self._stream[: self.length].copy()))

    @torch.no_grad()
    def grow_to(self, capacity: int) -> None:
        """Enlarge the buffers to at least `capacity` slots."""
        if capacity > self.capacity:
            self._resize(capacity)

    @torch.no_grad()
    def shrink_to(self, capacity: int) -> None:
        """Shrink the buffers to `capacity` slots, or to the slots in use if those are more."""
        if (capacity := max(capacity, self.length)) < self.capacity:
            self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        for name in ("_written_at", "_stream"):
            grown = np.zeros(capacity, np.int64)
            grown[: self.length] = getattr(self, name)[: self.length]
            setattr(self, name, grown)
        self._slots = np.arange(capacity)
        self.cursor.capacity = capacity
        for rows in self.buffers:
            rows.resize()

    @torch.inference_mode()
    def as_read(self, rows: Tensor) -> list[Tensor]:
        """Keys and values [H, k, D] of the rows numbered `rows` [k], as attention reads them.

        The list has the keys of layer 0, its values, the keys of layer 1, and so on.
        """
        views = [self._view(at, which)[0] for at in range(len(self.row_layers)) for which in (0, 1)]
        if len(rows) == self.length:
            return views
        on = {device: to_device([rows], device)[0] for device in self.devices}
        return [view.index_select(1, on[view.device]) for view in views]

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
        for layer, state in zip(self._stateful_layers, self._state, strict=True):
            layer.set_state(state)
        self._is_clean = True

    def _cos_sin(self, written_at: Positions, slots: Tensor, stream: Positions) -> CosSinByTensor:
        """Cosines and sines that rotate rows with stream positions `stream` [n] to `slots` [n]."""
        old = torch.from_numpy(written_at)
        new = torch.from_numpy(stream) if self.absolute_positions else slots
        cos_sin = dict[int, Tensor]()
        for rotation, numbers in self._tensors_by_rotation.items():
            cos_sin |= dict.fromkeys(numbers, torch.stack(rotation.cos_sin(old, new)))
        return cos_sin

    def _move(self, slots: Tensor, start: int, leaving: Tensor, store: Store | None = None) -> None:
        """Move the rows in `slots` [n] to `start` and on; first `store` those in `leaving`."""
        at, end, gone = slots.numpy(), start + len(slots), leaving.numpy()
        written_at, stream = self._written_at[at], self._stream[at]
        cos_sin = self._cos_sin(written_at, torch.arange(start, end), stream)
        parts = self._parts(len(slots))
        needed, devices = [slots, leaving, *cos_sin.values()], {part.rows.device for part in parts}
        on = {device: to_device(needed, device) for device in devices}
        if store is not None:
            of_leaving = self._parts(len(leaving))
            blocks = [part.copy_rows(on[part.rows.device][1]).flatten(0, 1) for part in of_leaving]
            tensors = [one for some in blocks for one in some]
            block = blocks[0] if len(blocks) == 1 else None
            store(KeyValues(self._stream[gone], self._written_at[gone], tensors, block=block))
        for part in parts if len(slots) else ():
            index, _, *turned = on[part.rows.device]
            part.write(start, part.copy_rows(index), dict(zip(cos_sin, turned, strict=True)))
        self._written_at[start:end], self._stream[start:end] = written_at, stream

    def _put(self, start: int, tensors: Sequence[Tensor], cos_sin: CosSinByTensor) -> None:
        """Write first-written rows, [H, n, D] of all tensors, to the slots from `start` on."""
        for part in self._parts(tensors[0].shape[1]):
            own = [tensors[number] for number in part.numbers]
            moved = to_device([*own, *cos_sin.values()], part.rows.device)
            rows, turned = torch.stack(moved[: len(own)]), moved[len(own) :]
            rows = rows.view(len(part.rows), -1, *rows.shape[1:])
            part.write(start, rows, dict(zip(cos_sin, turned, strict=True)))

    def _parts(self, count: int) -> list[RowBuffer]:
        return [part for rows in self.buffers for part in rows.parts(count)]


RowArguments = tuple[RowBuffers, int]  # buffers of some layers, and the layer's number in them
StepRows = BoundedCache | RowBuffers  # what a decode step reads and writes: it has one pool


class RowLayer:
    """The keys and values of one layer. A layer with a sliding window stores all rows, too."""

    def __init__(self, rows: RowBuffers, number: int) -> None:
        super().__init__()
        self.cursor, self.tensors = rows.cursor, rows.layers[number]
        self._rows, self._number = rows, number

    def allocate(self, *rows: Tensor) -> None:
        """Make the buffers for keys and values like `rows`, each [1, H, m, D]."""
        self._rows.allocate(self._number, *rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write m new keys and values [1, H, m, D]; returns all of each, [1, H, n + m, D]."""
        keys, values = self.tensors
        if (slot := self.cursor.slot) is not None:
            return keys.write_to_slot(slot, key_states), values.write_to_slot(slot, value_states)
        if keys.buffer is None:
            self.allocate(key_states, value_states)
        self.cursor.written = key_states.shape[2]
        return keys.write(self.cursor, key_states), values.write(self.cursor, value_states)


@runtime_checkable
class StatefulLayer(Protocol):
    """Protocol of a cache layer with recurrent or convolution states."""

    def copy_state(self) -> dict[tuple[str, int], Tensor]:
        """A copy of the states written so far, by kind (`conv`, `recurrent`) and number."""

    def set_state(self, state: dict[tuple[str, int], Tensor]) -> None:
        """Replace the layer's states by a copy of `state`."""


def row_layer_indices(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """Map the model's numbers of layers with keys and values to indices among these layers."""
    with_rows = (number for number, (has_rows, _) in enumerate(kinds) if has_rows)
    return {number: at for at, number in enumerate(with_rows)}
