"""The number type of the cache for packed weights: the one in which attention is faster here.

Products of packed weights are rounded to bfloat16, so that float16 and bfloat16 are both precise
enough for keys and values, and take half the memory of float32. Which of them is faster depends on
the processor: attention over float16 takes 1.6 times as long as over bfloat16 on one with AVX-512
FP16, and four times as long on one without. So it is measured once for each processor, version of
torch and shape, and kept beside the compiled programs.
"""

from __future__ import annotations

import hashlib
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from sirchat.paths import compiled_dir, private_dir, write_private

CacheTypeName = Literal["auto", "float32", "bfloat16", "float16"]

_CANDIDATES = (torch.bfloat16, torch.float16)
_ROWS, _ROUNDS = 1024, 12


class HeadShape(NamedTuple):
    """The number of query heads and of key heads in a layer, and the numbers in a head."""

    queries: int
    keys: int
    size: int


def head_shape(config: Any) -> HeadShape:
    """The shape of attention in the text part of a model with this config, in its widest layer.

    What the config doesn't say is assumed to be as in most models.
    """

    # As attributes, sizes that differ by layer raise an error.
    values = config.get_text_config(decoder=True).to_dict()

    def most(name: str, usual: int) -> int:
        value = values.get(name) or usual
        return int(max(value) if isinstance(value, list | tuple) else value)

    queries = most("num_attention_heads", 1)
    keys = most("num_key_value_heads", queries)
    return HeadShape(queries, keys, most("head_dim", most("hidden_size", 64) // queries))


def fastest_type(shape: HeadShape) -> torch.dtype:
    """The type in which attention over 1,024 rows is faster, measured now or earlier."""
    path = compiled_dir() / f"{_key(shape)}.cache-type"
    with suppress(OSError):
        kept = path.read_text(encoding="utf-8")
        for one in _CANDIDATES:
            if kept == str(one):
                return one
    seconds = measure(shape)
    fastest = min(seconds, key=seconds.__getitem__)
    with suppress(OSError):  # measured again at the next start
        write_private(private_dir(path.parent) / path.name, str(fastest), replaces=True)
    return fastest


@torch.inference_mode()
def measure(shape: HeadShape) -> dict[torch.dtype, float]:
    """For each type, the least seconds that one layer's attention takes for one token."""
    times: dict[torch.dtype, list[float]] = {one: [] for one in _CANDIDATES}
    query = torch.randn(1, shape.keys, shape.queries // shape.keys, shape.size)
    rows = torch.randn(1, shape.keys, _ROWS, shape.size)
    for _ in range(_ROUNDS):
        for dtype, taken in times.items():
            queries, keys = query.to(dtype), rows.to(dtype)
            begun = time.perf_counter()
            F.scaled_dot_product_attention(queries, keys, keys)
            taken.append(time.perf_counter() - begun)
    return {dtype: min(taken) for dtype, taken in times.items()}


def processor() -> str:
    """The processor's name, as the system gives it."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """What Linux says of the first processor under one of these names; empty if it says nothing."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""


def _key(shape: HeadShape) -> str:
    # Not the number of threads: it depends on the load, and a chat is to resume with the same type.
    machine = (torch.backends.cpu.get_cpu_capability(), processor(), torch.__version__)
    about = repr((shape, machine))
    return hashlib.sha256(about.encode()).hexdigest()[:24]
