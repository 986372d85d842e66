"""The devices that a model computes on, and how much of their memory it takes.

A model may be spread over several devices, see `placement.py`: then each layer's keys and values
are where the layer is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.archive import Archive
from sirchat.memory.cache import BoundedCache
from sirchat.models.layout import DISK

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

Where = torch.device | str
"""A device, or the text `disk`; the CPU is the text `cpu`, as accelerate needs it."""

Placement = dict[str, Where]
"""The device of each module whose weights stay together: of layers, and modules outside of them."""

CPU = "cpu"


def accelerators() -> list[torch.device]:
    """The GPUs of this machine."""
    if torch.cuda.is_available():
        return [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    return [torch.device("mps", 0)] if torch.backends.mps.is_available() else []


def pick_device(name: DeviceName) -> torch.device:
    """The device `name`, or for `auto` the best one; raises ModelError if it is not available."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        there = ", ".join(kind for kind, there in available.items() if there)
        raise ModelError(f"device {name!r} is not available", hint=f"available: {there}")
    return torch.device(name)


def pick_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The number type `name`; for `auto`, float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def is_within(name: str, outer: str) -> bool:
    """Whether the module `name` is `outer`, or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a GPU."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    free: int = torch.get_device_module(device).mem_get_info(device)[0]
    return free


def is_spread(module: Any) -> bool:
    """Whether a model is spread over several devices, or partly on disk."""
    where = set(getattr(module, "hf_device_map", {}).values())
    return len(where) > 1 or DISK in where


def input_device(module: Any) -> torch.device:
    """The device to which ids are sent: that of the embeddings; the CPU if these are on disk."""
    device: torch.device = module.device
    return torch.device(CPU) if device.type == "meta" else device


def own_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """All parameters with their names, in order, each only once.

    A tied parameter, such as an output head with the weights of the embeddings, is left out: for
    weights on disk, accelerate lists it as a second one.
    """
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    return (pair for pair in module.named_parameters() if pair[0] not in tied)


def stored_weights_of(module: Any) -> Iterator[Tensor]:
    """Yield all parameters, in order; those that lie on disk are read into memory."""
    for name, one in own_parameters(module):
        if not one.is_meta:
            yield one
            continue
        from transformers.integrations.accelerate import load_offloaded_parameter

        yield load_offloaded_parameter(module, name)


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes of weights, KV cache and archive that lie on one device, or on disk."""

    device: str
    weights: int
    cache: int
    archive: int


def memory_by_device(
    module: Any, cache: BoundedCache, archive: Archive | None = None
) -> list[DeviceMemory]:
    """The memory that a model, its cache and its archive take on each device, in layer order."""
    weights, archived = _weights_by_device(module), Counter[str]()
    rows = Counter({str(one): size for one, size in cache.bytes_by_device().items()})
    if archive is not None:
        archived += archive.bytes_by_device()
    names = dict.fromkeys([*weights, *rows, *archived])
    return [DeviceMemory(one, weights[one], rows[one], archived[one]) for one in names]


def _weights_by_device(module: Any) -> Counter[str]:
    sizes, seen = Counter[str](), set[object]()
    placement: Placement = getattr(module, "hf_device_map", {})
    for name, one in chain(own_parameters(module), module.named_buffers()):
        where = str(one.device)
        if one.is_meta:
            where = next(str(at) for part, at in placement.items() if is_within(name, part))
        key = name if one.is_meta else (where, one.data_ptr(), one.nbytes)
        if key not in seen:
            seen.add(key)
            sizes[where] += one.nbytes
    return sizes
