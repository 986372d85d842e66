"""The checks of `sirchat doctor`: versions, the machine, folders, the model and its speed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from sirchat import __version__
from sirchat.errors import SirchatError
from sirchat.memory.cache import BoundedCache
from sirchat.models.compiling import CompileMode, describe_decode_step
from sirchat.models.device_map import Spread
from sirchat.models.devices import (
    describe_threads,
    free_thread_count,
    memory_by_device,
    physical_cores,
)
from sirchat.models.load import MIN_RESERVED_ROWS, load_model
from sirchat.models.model import LoadedModel
from sirchat.models.processor import processor_name
from sirchat.paths import config_dir, data_dir, state_dir, with_tilde

_LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "prompt-toolkit"),
    "gguf",
)
_PREFILL_TOKENS = 512  # tokens that the speed test reads in one pass
_DECODED_TOKENS = 32  # tokens that it then decodes, one at a time
_MAX_DECODE_SECONDS = 5.0  # seconds after which the speed test stops decoding


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
    for name, folder in (("config", config_dir()), ("data", data_dir()), ("state", state_dir())):
        yield _check_folder(f"{name} folder", folder)
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


def _check_folder(name: str, folder: Path) -> Finding:
    shown = with_tilde(folder)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        return Finding(name, shown, f"{with_tilde(nearest)} can't be written")
    if nearest == folder and os.name == "posix" and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        return Finding(name, shown, "other users can open this folder; chmod 700 prevents that")
    return Finding(name, shown if nearest == folder else f"{shown} (not there yet)")


def _check_model(name: str, device_map: Spread, compiles: CompileMode) -> Iterator[Finding]:
    begun = time.perf_counter()
    try:
        how: CompileMode = "off" if compiles == "off" else "auto"
        model = load_model(name, device_map=device_map, cache_rows=MIN_RESERVED_ROWS, compile=how)
    except SirchatError as error:
        yield Finding("model", name, str(error))
        return
    took = time.perf_counter() - begun
    yield Finding(
        "model",
        f"{name}: {model.precision} on {model.device}, context {model.context_length:,}, loaded "
        f"in {took:.1f} s",
    )
    yield Finding("sentence encoder", model.encoder_description)
    yield from _measure_memory(model)
    is_off = compiles == "off"
    yield Finding("compiled step", "no: --compile off" if is_off else describe_decode_step(model))
    yield _measure_speed(model)


def _measure_memory(model: LoadedModel) -> Iterator[Finding]:
    cache = model.new_cache(min(MIN_RESERVED_ROWS, model.context_length))
    model.forward([0], cache)
    for memory in memory_by_device(model.module, cache):
        cached = f"{memory.cache / 1e6:,.1f} MB KV cache for {cache.capacity:,} tokens"
        held = f"{memory.weights / 1e6:,.1f} MB weights{f', {cached}' if memory.cache else ''}"
        yield Finding("memory", f"{memory.device}: {held}")


def _measure_speed(model: LoadedModel) -> Finding:
    """Measure the tokens per second that a model reads, and writes without sampling."""
    count = min(_PREFILL_TOKENS, model.context_length // 2)
    _seconds_of_pass(model, count // 2, model.new_cache(count))  # a warm-up
    cache = model.new_cache(count + _DECODED_TOKENS)
    prefill = count / _seconds_of_pass(model, count, cache)
    steps, end = list[float](), time.perf_counter() + _MAX_DECODE_SECONDS
    while len(steps) < _DECODED_TOKENS and time.perf_counter() < end:
        steps.append(_seconds_of_pass(model, 1, cache))
    threads = describe_threads(model.device)
    return Finding(
        "speed",
        f"reads {prefill:,.0f} and writes {1 / median(steps):,.0f} tokens a second"
        f"{', ' if threads else ''}{threads}, with {count} tokens in the cache",
    )


def _seconds_of_pass(model: LoadedModel, count: int, cache: BoundedCache) -> float:
    ids = [at % model.vocab_size for at in range(cache.length, cache.length + count)]
    begun = time.perf_counter()
    model.read(ids, cache).logits[:1].tolist()  # a GPU computes in the background: wait for it
    cache.commit(count)
    return time.perf_counter() - begun
