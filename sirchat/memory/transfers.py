"""Copies keys and values between a GPU and main memory while the computation continues.

Copies from a GPU run on a CUDA stream of their own, into pinned memory, while the next step is
computed; only code that reads a copy waits until the copy is finished. Copies to a GPU come from
pinned memory and run on the CUDA stream of the computation; the CPU does not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Protocol: copies of tensors from a GPU to main memory, which may still be running."""

    def is_done(self) -> bool:
        """Whether all copies are finished; if they are, `take` returns at once."""

    def take(self) -> list[Tensor]:
        """Wait until all copies are finished; returns the copied tensors in main memory."""


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
    """Starts copies from GPUs to main memory; uses one CUDA stream for each GPU."""

    _streams: dict[torch.device, Any] = field(default_factory=dict)

    def to_host(self, tensors: Sequence[Tensor]) -> Transfer:
        """Start to copy tensors to main memory; returns the running copies.

        The tensors must not change until the copies are finished.
        """
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
            one.record_stream(streams[one.device])  # keeps its memory until the copy is finished
            copies.append(copy)
        ends = [one.record_event() for one in streams.values()]
        return _UnderWay(copies, ends) if ends else _Finished(copies)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Copy the tensor to `device`; returns the copy.

    Returns the same tensor if it is on `device` already, or if `device` is None. The CPU does not
    wait for a copy from main memory to a GPU.
    """
    if device is None or tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
