"""Copies of keys and values between a GPU and main memory, for which the computation does not wait.

From a GPU they go on a stream of their own into pinned memory, while the next step is computed;
only who reads them waits for their end. To a GPU they go from pinned memory on the stream of the
computation, so that the CPU goes on at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Copies in main memory of some tensors, perhaps not finished."""

    def is_done(self) -> bool:
        """Whether `take` would not wait."""

    def take(self) -> list[Tensor]:
        """The copies, once they are finished."""


@dataclass(frozen=True)
class _Finished:
    tensors: list[Tensor]

    def is_done(self) -> bool:
        return True

    def take(self) -> list[Tensor]:
        return self.tensors


@dataclass(frozen=True)
class _UnderWay:
    tensors: list[Tensor]
    ends: list[Any]  # events of CUDA

    def is_done(self) -> bool:
        return all(one.query() for one in self.ends)

    def take(self) -> list[Tensor]:
        for one in self.ends:
            one.synchronize()
        return self.tensors


@dataclass
class Transfers:
    """Begins copies from GPUs to main memory; has one stream for each GPU."""

    _streams: dict[torch.device, Any] = field(default_factory=dict)

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """Begin to copy tensors, which nobody changes meanwhile, to main memory."""
        copies, streams = list[Tensor](), dict[torch.device, Any]()
        for one in tensors:
            if not one.is_cuda:
                copies.append(one.to("cpu"))
                continue
            if one.device not in streams:
                streams[one.device] = stream = self._stream(one.device)
                stream.wait_stream(torch.cuda.current_stream(one.device))
            copy = torch.empty(one.shape, dtype=one.dtype, pin_memory=True)
            with torch.cuda.stream(streams[one.device]):
                copy.copy_(one, non_blocking=True)
            one.record_stream(streams[one.device])  # its memory is not used again before
            copies.append(copy)
        ends = [one.record_event() for one in streams.values()]
        return _UnderWay(copies, ends) if ends else _Finished(copies)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor on a device; the CPU does not wait for a copy from main memory to a GPU."""
    if device is None or tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
