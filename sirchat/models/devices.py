"""The devices that a model computes on, and how much of their memory the model takes.

A model may be spread over several devices, see `placement.py`. In that case, each layer's keys and
values are on the device that computes the layer.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.archive import Archive
from sirchat.memory.cache import BoundedCache

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

# A place for a part of a model: a device, or the text `disk`; the CPU is the text `cpu`.
Where = torch.device | str

# The device of each layer, and of each module outside the layers, by the module's name.
Placement = dict[str, Where]

CPU, DISK = "cpu", "disk"


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


Result = TypeVar("Result")

_SYS = Path("/sys")


def in_ending_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread of its own, which then ends; returns its result or raises its error.

    Use this function to load a model in one thread if another thread will generate. OpenMP gives
    each thread that computes its own worker threads, until the computing thread ends. If there are
    more worker threads than cores, GNU's OpenMP lets threads that wait for each other sleep at
    once, and a token takes up to four times as long.
    """
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result()


def use_threads(wanted: int, environment: Mapping[str, str] = os.environ) -> None:
    """Set torch's number of CPU threads to `wanted`, if `wanted` is above 0.

    If `wanted` is 0, the environment variable SIRCHAT_THREADS or OMP_NUM_THREADS gives the number;
    if neither is set, torch gets one thread for each free core.
    """
    told = environment.get("SIRCHAT_THREADS", "").strip()
    if wanted == 0 and told.isdecimal():
        wanted = int(told)
    if wanted == 0 and not environment.get("OMP_NUM_THREADS"):
        wanted = free_threads()
    if wanted:
        torch.set_num_threads(wanted)


def free_threads() -> int:
    """The number of CPU threads for which physical cores are free on this machine; at least 1."""
    everywhere, load = range(os.cpu_count() or 1), 0.0
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(everywhere)
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
    return threads_for(
        physical_cores(set(everywhere) | allowed), physical_cores(allowed), cpu_quota(), load
    )


def threads_for(cores: int, allowed: int, quota: float | None, load: float) -> int:
    """Compute for how many CPU threads physical cores are free; at least one.

    Args:
        cores: physical cores of the machine.
        allowed: physical cores that this process may use.
        quota: CPU time that the process may take, in cores; None for no limit.
        load: load average of the last minute, in busy cores.
    """
    most = allowed if quota is None else min(allowed, int(quota))
    return max(1, min(most, cores - round(load)))


def physical_cores(cpus: set[int], sys: Path = _SYS) -> int:
    """Count the physical cores of the logical CPUs `cpus`; two logical CPUs may share a core."""
    siblings = set[str]()
    for cpu in cpus:
        path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(path.read_text("ascii").strip())
        except OSError:  # not Linux, or not stated: count each CPU as a core
            siblings.add(f"{cpu}")
    return len(siblings)


def cpu_quota(sys: Path = _SYS) -> float | None:
    """CPU time, in cores, that a Linux control group (version 2 or 1) allows; None for no limit."""
    try:
        quota, period = (sys / "fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            folder = sys / "fs/cgroup/cpu"
            quota = (folder / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text("ascii").strip()
        except OSError:
            return None
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None  # "max", or -1
    return int(quota) / int(period)


def threads_in_words(device: torch.device) -> str:
    """torch's number of CPU threads as text, such as `2 threads`; empty if `device` is no CPU."""
    if device.type != "cpu":
        return ""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
