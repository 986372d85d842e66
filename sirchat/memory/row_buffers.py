"""The buffers of a KV cache: keys and values of all layers, in one tensor if the layers agree.

Keys are also kept as first written. A row that moves is rotated from those, so errors never add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sirchat.memory.rope import Rotation

_MAX_ROTATED_BYTES = 2**26  # bytes of keys in float32 that are rotated at once, but on a CPU

# Cosines and sines, [2, n, d/2], that rotate n rows of a tensor, by its number in `tensors`.
CosSinByTensor = Mapping[int, Tensor]


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
    """The buffers of all layers: one tensor, `pool`, if the layers agree, else one for each tensor.

    Layers agree if they have the same shape, dtype, device and rotated dimensions of keys (with any
    frequencies), and no rotated values.
    """

    def __init__(
        self,
        cursor: Cursor,
        rotations: Sequence[LayerRotation],
        dtype: torch.dtype | None,
        devices: Sequence[torch.device | None],
    ) -> None:
        self.cursor, self._dtype = cursor, dtype
        # [L, 3, H, capacity, D]: keys as attention reads them, keys as first written, values
        self.pool: Tensor | None = None
        self.layers = [
            (CachedTensor(rotation.key, device), CachedTensor(rotation.value, device))
            for rotation, device in zip(rotations, devices, strict=True)
        ]
        # Keys of layer 0, values of layer 0, keys of layer 1, and so on.
        self.tensors = [tensor for layer in self.layers for tensor in layer]
        # Numbers of the tensors that have the same frequencies, by the first one's rotation.
        self.tensors_by_rotation = dict[Rotation, list[int]]()
        for number, tensor in enumerate(self.tensors):
            if tensor.rotation is not None:
                same = filter(tensor.rotation.has_same_angles, self.tensors_by_rotation)
                self.tensors_by_rotation.setdefault(next(same, tensor.rotation), []).append(number)
        keys = [rotation.key for rotation in rotations if rotation.key]
        layouts = {(len(key.inv_freq), key.interleaved, key.offset) for key in keys}
        rotated = sorted(chain(*self.tensors_by_rotation.values()))
        are_keys = rotated == [*range(0, len(self.tensors), 2)]
        self._can_pool = are_keys and len(layouts) == len(set(devices)) == 1
        self._kinds = set[tuple[int, int, torch.dtype, torch.device]]()  # H, D and so on, so far

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
        if self.pool is None:
            return [
                RowBuffer(tensor.buffer.transpose(0, 1), tensor.rotation, range(number, number + 1))
                for number, tensor in enumerate(self.tensors)
                if tensor.buffer is not None
            ]
        heads, _, dims = self.pool.shape[2:]
        # On a CPU, whose caches hold one layer's rows, a part has one layer.
        is_cpu, rotation = self.pool.device.type == "cpu", self.tensors[0].rotation
        step = 1 if is_cpu else max(1, _MAX_ROTATED_BYTES // max(1, 4 * heads * count * dims))
        return [
            RowBuffer(rows, rotation, range(2 * step * at, 2 * step * at + 2 * len(rows)))
            for at, rows in enumerate(torch.split(self.pool, step))
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
