"""The checks of `sirchat doctor`: versions, the machine and the model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sirchat import __version__
from sirchat.errors import SirchatError
from sirchat.models.compiling import CompileMode, describe_decode_step, processor_name
from sirchat.models.devices import (
    Spread,
    free_thread_count,
    memory_by_device,
    physical_cores,
)
from sirchat.models.load import MIN_RESERVED_ROWS, load_model

_LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "prompt-toolkit"),
    "gguf",
)


@dataclass(frozen=True)
class Finding:
    """The result of one check; `problem` says what is wrong, or is empty."""

    name: str
    value: str
    problem: str = ""


def run_checks(
    model_name: str, device_map: Spread = "off", compiles: CompileMode = "auto"
) -> Iterator[Finding]:
    """Yield the result of each check; the slow checks of the model come last."""
    yield Finding("sirchat", f"{__version__}, Python {platform.python_version()}")
    yield Finding("libraries", ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES))
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processor", _describe_processor())
    yield Finding("GPU", _describe_gpu())
    yield from _check_model(model_name, device_map, compiles)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"


def _describe_processor() -> str:
    cpus = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
    cores = physical_cores(cpus or set(range(os.cpu_count() or 1)))
    kind = torch.backends.cpu.get_cpu_capability()
    return f"{processor_name()}, {cores} cores, {free_thread_count()} of them free, {kind}"


def _describe_gpu() -> str:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return "Apple" if torch.backends.mps.is_available() else "none"


def _check_model(name: str, device_map: Spread, compiles: CompileMode) -> Iterator[Finding]:
    begun = time.perf_counter()
    try:
        how: CompileMode = "off" if compiles == "off" else "auto"
        model = load_model(name, device_map=device_map, compile=how)
    except SirchatError as error:
        yield Finding("model", name, str(error))
        return
    took = time.perf_counter() - begun
    yield Finding(
        "model",
        f"{name}: {model.precision} on {model.device_names}, context {model.context_length:,}, "
        f"loaded in {took:.1f} s",
    )
    yield Finding("sentence encoder", model.encoder_description)
    cache = model.new_cache(min(MIN_RESERVED_ROWS, model.context_length))
    model.forward([0], cache)
    for memory in memory_by_device(model.module, cache):
        cached = f"{memory.cache / 1e6:,.1f} MB KV cache for {cache.capacity:,} tokens"
        held = f"{memory.weights / 1e6:,.1f} MB weights{f', {cached}' if memory.cache else ''}"
        yield Finding("memory", f"{memory.device}: {held}")
    is_off = compiles == "off"
    yield Finding("compiled step", "no: --compile off" if is_off else describe_decode_step(model))
