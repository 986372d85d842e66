"""Measures which number type of the KV cache and which products of packed weights are fastest here.

Once for each processor, version of torch and shape; the results are kept beside the compiled
programs.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from sirchat.models.packed import (
    GROUP,
    Int4Linear,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    Unpacked,
    four_bit_block,
    matmul_method_of,
    set_matmul_method,
)
from sirchat.paths import compiled_dir, private_dir, write_private

CacheTypeName = Literal["auto", "float32", "bfloat16", "float16"]
UnpackName = Literal["auto", "bfloat16", "float32"]

Result = TypeVar("Result")

_TYPES = (torch.bfloat16, torch.float16)
_ROWS, _ROUNDS = 1024, 12

# Rows and columns of the matrix whose products are measured; and the most rows of an input.
_SIZE, _WIDE = 1024, 64

_TIMES = 6  # number of times that each product is measured

# The limits in `MatmulMethod` are among these numbers of rows: few, so that measurements agree.
_STEPS = (8, 32, 64)

_UNPACKED: tuple[Unpacked, ...] = ("bfloat16", "float32")


class HeadShape(NamedTuple):
    """The numbers of query heads and key heads, and the size of a head."""

    queries: int
    keys: int
    size: int


def head_shape(config: Any) -> HeadShape:
    """The attention in the widest layer; what the config lacks is as in most models."""
    # As attributes, sizes that differ by layer raise an error.
    values = config.get_text_config(decoder=True).to_dict()

    def most(name: str, usual: int) -> int:
        value = values.get(name) or usual
        return int(max(value) if isinstance(value, list | tuple) else value)

    queries = most("num_attention_heads", 1)
    keys = most("num_key_value_heads", queries)
    return HeadShape(queries, keys, most("head_dim", most("hidden_size", 64) // queries))


def fastest_type(shape: HeadShape) -> torch.dtype:
    """The 16-bit number type in which attention over 1,024 cached tokens is faster here."""
    # Products of packed weights are rounded to bfloat16, so both are precise enough. Attention over
    # float16 takes 1.6 times as long with AVX-512 FP16, and four times without.

    def measured() -> str:
        seconds = measure_attention(shape)
        return str(min(seconds, key=seconds.__getitem__))

    return _read_or_measure(
        "cache-type", shape, {str(dtype): dtype for dtype in _TYPES}.get, measured
    )


def choose_matmul_method(module: nn.Module, unpack: UnpackName) -> None:
    """Choose how packed layers multiply: the fastest way, or as the setting `unpack_dtype` says."""
    if matmul_method_of(module) is None:
        return
    if unpack == "auto":
        products = fastest_matmul_method()
    elif unpack == "bfloat16":
        products = MatmulMethod()
    else:
        products = MatmulMethod(unpack, few_4=64, few_8=32, few=32)  # which suits most processors
    set_matmul_method(module, products)


def fastest_matmul_method() -> MatmulMethod:
    """The fastest way to multiply packed weights with many rows on this processor."""
    # Unpacked weights are faster, but without instructions for bfloat16 that takes ten times as
    # long as float32, or more.
    return _read_or_measure(
        "products",
        None,
        _parse_matmul_method,
        lambda: json.dumps(measure_matmul_method()._asdict()),
    )


@torch.inference_mode()
def measure_matmul_method() -> MatmulMethod:
    """Measure the fastest way to multiply a packed matrix [1024, 1024], in some tens of ms."""
    q = torch.arange(_SIZE * _SIZE).view(_SIZE, _SIZE) % 16
    scale = torch.ones(_SIZE, _SIZE // GROUP)
    eight = Int8Linear(q.to(torch.int8), torch.ones(_SIZE, dtype=torch.bfloat16))
    packs = four_bit_block() > 0  # if not, no layer has four bits
    four: PackedLinear = Int4Linear.of_values(q.to(torch.uint8), scale, scale) if packs else eight
    rows = torch.randn(_WIDE, _SIZE)
    few = rows[: _STEPS[0]].bfloat16()
    works: dict[str, Callable[[], object]] = {
        "few_4": partial(four.multiply_few, few),
        "few_8": partial(eight.multiply_few, few),
    }
    for dtype in _UNPACKED:
        kind = MatmulMethod(dtype).type
        works |= {
            f"unpack_4 {dtype}": partial(four.unpacked, kind),
            f"unpack_8 {dtype}": partial(eight.unpacked, kind),
            f"product {dtype}": partial(torch.mm, rows.to(kind), four.unpacked(kind)),
        }
    taken = _shortest_times(works)

    def seconds(dtype: Unpacked) -> float:
        return taken[f"unpack_4 {dtype}"] + taken[f"product {dtype}"]

    def limit(kernel: str, seconds: float) -> int:
        """The largest number of rows in `_STEPS` that a kernel multiplies in about `seconds`."""
        most = seconds / taken[kernel] * len(few)
        return max((rows for rows in _STEPS if rows <= 1.2 * most), default=_STEPS[0])

    dtype = min(_UNPACKED, key=seconds)
    product = taken[f"product {dtype}"]
    return MatmulMethod(
        dtype,
        few_4=limit("few_4", seconds(dtype)),
        few_8=limit("few_8", taken[f"unpack_8 {dtype}"] + product),
        few=limit("few_4", product),
    )


@torch.inference_mode()
def measure_attention(shape: HeadShape) -> dict[torch.dtype, float]:
    """Measure a layer's attention for one token: the shortest time for each type, in seconds."""
    times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in _TYPES}
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
    """The processor's name."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """The first value of Linux's /proc/cpuinfo whose key begins with one of `names`; "" if none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""


def _parse_matmul_method(kept: str) -> MatmulMethod | None:
    try:
        products = MatmulMethod(**json.loads(kept))
    except (ValueError, TypeError):
        return None
    limits = (products.few_4, products.few_8, products.few)
    is_valid = products.dtype in _UNPACKED and all(limit in _STEPS for limit in limits)
    return products if is_valid else None


def _read_or_measure(
    kind: str,
    shape: HeadShape | None,
    parse: Callable[[str], Result | None],
    measure: Callable[[], str],
) -> Result:
    """Parse the result that an earlier start wrote into a file; if there is none, measure it."""
    path = compiled_dir() / f"{_machine_hash(shape)}.{kind}"
    with suppress(OSError, UnicodeDecodeError):
        kept = parse(path.read_text(encoding="utf-8"))
        if kept is not None:
            return kept
    text = measure()
    with suppress(OSError):  # measured again at the next start
        write_private(private_dir(path.parent) / path.name, text, replaces=True)
    result = parse(text)
    assert result is not None
    return result


def _shortest_times(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Run each function several times, by turns; returns the shortest time of each, in seconds."""
    # Seconds of this thread, because other programs may use the processor in between.
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(_TIMES):
        for name, work in works.items():
            begun = time.thread_time()
            work()
            taken[name].append(time.thread_time() - begun)
    return {name: min(seconds[1:]) for name, seconds in taken.items()}


def _machine_hash(shape: HeadShape | None) -> str:
    # Not the number of threads: it depends on the load, and a chat is to resume with the same type.
    machine = (torch.backends.cpu.get_cpu_capability(), processor(), torch.__version__)
    about = repr((shape, machine))
    return hashlib.sha256(about.encode()).hexdigest()[:24]
