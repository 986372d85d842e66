"""Keys and values of tokens, as first written, and their copies between a GPU and main memory.

Copies from a GPU run on a CUDA stream of their own, into pinned memory; only who reads a copy waits
for it. Copies to a GPU come from pinned memory and run on the stream of the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]  # of tokens in the stream, the whole conversation

# A copy of the states of all recurrent and convolution layers, one dictionary for each layer; the
# key of a tensor is its kind, `conv` or `recurrent`, and its number.
CacheState = tuple[dict[tuple[str, int], Tensor], ...]


@dataclass(frozen=True)
class KeyValues:
    """The keys and values of n tokens, of one layer or of all.

    `positions` [n] are the tokens' stream positions, `written_at` [n] the rotary positions of their
    keys. `tensors` has two for each layer, keys then values, each [H, n, D].
    """

    positions: Positions
    written_at: NDArray[np.int64]
    tensors: list[Tensor]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device | str) -> KeyValues:
        """The same on `device`."""
        tensors = [tensor.to(device) for tensor in self.tensors]
        return KeyValues(self.positions, self.written_at, tensors)

    def take(self, index: NDArray[np.int64]) -> KeyValues:
        """A copy of those with the indices `index` [k]."""
        chosen = torch.from_numpy(index)
        tensors = [tensor.index_select(1, chosen.to(tensor.device)) for tensor in self.tensors]
        return KeyValues(self.positions[index], self.written_at[index], tensors)


def merged(first: KeyValues, second: KeyValues) -> KeyValues:
    """Copies of both, in ascending order of position, on the devices of the first."""
    positions = np.concatenate([first.positions, second.positions])
    order = np.argsort(positions)
    chosen = torch.from_numpy(order)
    tensors = [
        torch.cat([a, to_device(b, a.device)], dim=1).index_select(1, chosen.to(a.device))
        for a, b in zip(first.tensors, second.tensors, strict=True)
    ]
    written_at = np.concatenate([first.written_at, second.written_at])[order]
    return KeyValues(positions[order], written_at, tensors)


@dataclass(frozen=True)
class Transfer:
    """Copies of tensors from GPUs to main memory, which may still be running."""

    tensors: list[Tensor]
    ends: list[Any]  # events of CUDA

    def is_done(self) -> bool:
        """Whether all copies are finished; then `take` returns at once."""
        return all(end.query() for end in self.ends)

    def take(self) -> list[Tensor]:
        """Wait until all copies are finished, and return them."""
        for end in self.ends:
            end.synchronize()
        return self.tensors


@dataclass
class Transfers:
    """Starts copies from GPUs to main memory; uses one CUDA stream for each GPU."""

    _streams: dict[torch.device, Any] = field(default_factory=dict)

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """Start to copy tensors, which must not change until the copies are finished."""
        copies, streams = list[Tensor](), dict[torch.device, Any]()
        for tensor in tensors:
            device = tensor.device
            if not tensor.is_cuda:
                copies.append(tensor.to("cpu"))
                continue
            if device not in streams:
                streams[device] = self._stream(device)
                streams[device].wait_stream(torch.cuda.current_stream(device))
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            with torch.cuda.stream(streams[device]):
                copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(streams[device])  # keeps its memory until the copy is finished
            copies.append(copy)
        return Transfer(copies, [stream.record_event() for stream in streams.values()])

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor on `device`, itself if it is there or `device` is None.

    The CPU does not wait for a copy to a GPU.
    """
    if device is None or tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
