"""The devices that a model computes on, and how much of their memory the model takes.

A model may be spread over several devices, see `placement.py`. In that case, each layer's keys and
values are on the device that computes the layer.
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
"""A place for a part of a model: a device, or the text `disk`; the CPU is the text `cpu`."""

Placement = dict[str, Where]
"""The device of each layer, and of each module outside the layers, by the module's name."""

CPU = "cpu"


def accelerators() -> list[torch.device]:
    """The GPUs of this machine."""
    if torch.cuda.is_available():
        return [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    return [torch.device("mps", 0)] if torch.backends.mps.is_available() else []


def pick_device(name: DeviceName) -> torch.device:
    """The torch device for the setting `device`; for `auto`, a GPU if there is one, else the CPU.

    Raises ModelError if the device `name` is not available.
    """
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
    """The torch number type for the setting `dtype`.

    For `auto`, this is float32 on a CPU and bfloat16 on a GPU.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def is_within(name: str, outer: str) -> bool:
    """Whether the module at the path `name` is the module at the path `outer`, or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def free_bytes(device: torch.device) -> int:
    """Bytes of free memory on a GPU."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    free: int = torch.get_device_module(device).mem_get_info(device)[0]
    return free


def is_spread(module: Any) -> bool:
    """Whether a model is spread over several devices, or partly on disk."""
    where = set(getattr(module, "hf_device_map", {}).values())
    return len(where) > 1 or DISK in where


def input_device(module: Any) -> torch.device:
    """The device to which a model's input ids are sent.

    This is the device of the embeddings, or the CPU if the embeddings are on disk.
    """
    device: torch.device = module.device
    return torch.device(CPU) if device.type == "meta" else device


def own_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each parameter of a model, in order, each only once.

    A tied parameter, such as an output head with the weights of the embeddings, is left out,
    because accelerate lists it a second time if the weights are on disk.
    """
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    return (pair for pair in module.named_parameters() if pair[0] not in tied)


def stored_weights_of(module: Any) -> Iterator[Tensor]:
    """Yield all parameters of a model, in order; parameters on disk are read into memory."""
    for name, one in own_parameters(module):
        if not one.is_meta:
            yield one
            continue
        from transformers.integrations.accelerate import load_offloaded_parameter

        yield load_offloaded_parameter(module, name)


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that a model's weights, KV cache and archive take on one device, or on disk."""

    device: str
    weights: int
    cache: int
    archive: int


def memory_by_device(
    module: Any, cache: BoundedCache, archive: Archive | None = None
) -> list[DeviceMemory]:
    """The memory that a model, its KV cache and its archive take on each device."""
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
