"""Chooses the number type of the KV cache, and how packed weights are multiplied, by processor.

A start takes what was measured before, or what suits the processor's features. A chat measures in
the background, and keeps the result beside the compiled programs, for the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sirchat.models.devices import most_of_onednn
from sirchat.models.ending_thread import call_in_new_thread
from sirchat.models.packed import (
    ANY_ROWS,
    MatmulMethod,
    PackedLinear,
    Unpacked,
    has_fast_bfloat16,
    has_own_products,
    matmul_method_of,
    set_matmul_method,
)
from sirchat.paths import compiled_dir, private_dir, write_private

CacheTypeName = Literal["auto", "float32", "bfloat16", "float16"]
UnpackName = Literal["auto", "bfloat16", "float32"]

Ways = Mapping[str, Callable[[], object]]  # ways to do the same work, by name

# Products of packed weights are rounded to bfloat16, so both types of a cache are precise enough.
# Attention over float16 takes 1.6 times as long with AVX-512 FP16, and four times without.
_TYPES: tuple[CacheTypeName, ...] = ("bfloat16", "float16")
_UNPACKED: tuple[Unpacked, ...] = ("bfloat16", "float32")

_HELD = 1024  # tokens in the cache over which attention is timed
_READ = 512  # rows of the products that say to which type weights are unpacked
# The limits in `MatmulMethod` are among these numbers of rows: few, so that measurements agree.
_STEPS = (8, 32, 64)
_OWN_STEPS = (8, 64, ANY_ROWS)  # and `own` among these, or 0
_OWN = "own products, rows: "
_MOST = 1 << 20  # weights of a matrix that is timed: 512 rows take 3 to 20 ms
_ALIGNED = 64  # its number of rows is a multiple of this, or the layer's

_ROUNDS, _CHECKED = 7, 3  # times that each way is timed; and if a choice is only checked
# What is usual, or was chosen, stays unless another way takes at most this share of its time: for
# number types; and for limits, near which both ways are about as fast, so that load changes much
_SHARE, _SHARE_AT_LIMIT = 2 / 3, 1 / 2
_HOPELESS = 8  # a way that takes so many times as long as another is not timed again

# Values of ONEDNN_MAX_CPU_ISA with which oneDNN has bfloat16, but no instructions for it
_CONVERTING = ("AVX512_CORE", "AVX512_CORE_VNNI")


class HeadShape(NamedTuple):
    """The numbers of query heads and key heads, and the size of a head."""

    queries: int
    keys: int
    size: int


class Choices(NamedTuple):
    """How a model with packed weights is computed here."""

    cache_type: CacheTypeName
    products: MatmulMethod
    # milliseconds of each way, by the work that was timed; empty if nothing was measured
    times: Mapping[str, Mapping[str, float]]


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


def choose_matmul_method(module: nn.Module, unpack: UnpackName) -> None:
    """Choose how packed layers multiply: the fastest way, or as the setting `unpack_dtype` says."""
    if matmul_method_of(module) is None:
        return
    fastest = choices_for(module).products if unpack == "auto" else usual_method(unpack)
    set_matmul_method(module, fastest._replace(own=0))  # until `products.cpp` is loaded


def choices_for(module: nn.Module) -> Choices:
    """What was measured for packed layers such as a module's, or else what is usual."""
    return _read(_path_for(module)) or _usual()


def usual_method(dtype: Unpacked) -> MatmulMethod:
    """How packed weights are multiplied if nothing was measured."""
    if dtype == "bfloat16":
        return MatmulMethod()
    # The kernels are twice as fast with AVX-512 as with AVX2; products in float32 are not.
    few = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
    return MatmulMethod(dtype, few_4=64, few_8=few, few=few)


def own_rows(module: nn.Module) -> int:
    """Up to how many rows `products.cpp` is to multiply with a module's packed layers."""
    return _own_rows(choices_for(module))


def measure_choices(module: nn.Module) -> Choices:
    """Time all ways for packed layers such as a module's, in some tenths of a second; keep it."""

    def work() -> Choices:
        _compute_alone()
        return _measured(module)

    choices = call_in_new_thread(work)
    _write(_path_for(module), choices)
    return choices


def check_in_background(module: nn.Module) -> threading.Thread | None:
    """Measure, if nothing was, or if what was chosen is now wrong by a third; for the next start.

    Returns the thread that does so, of low priority; None for a module without packed layers.
    """
    if matmul_method_of(module) is None:
        return None

    def work() -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        _compute_alone()
        kept = _read(_path_for(module))
        if kept is None or not _is_right(module, kept):
            _write(_path_for(module), _measured(module))

    # No daemon: torch may crash if the program ends while it computes.
    thread = threading.Thread(target=work, name="measuring")
    thread.start()
    return thread


def time_ways(ways: Ways, rounds: int = _ROUNDS) -> dict[str, list[float]]:
    """Time each way once in each round, after a warm-up; returns the seconds by name."""
    # The CPU time of this thread, because other programs may use the processor in between. On
    # Windows it has ticks of 16 ms.
    is_fine = time.get_clock_info("thread_time").resolution < 1e-4
    clock = time.thread_time if is_fine else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            begun = clock()
            work()
            taken[name].append(max(clock() - begun, 1e-9))
        if number == 1:
            least = min(seconds[1] for seconds in taken.values())
            ways = {name: ways[name] for name in ways if taken[name][1] < _HOPELESS * least}
    return {name: seconds[1:] for name, seconds in taken.items()}


def fastest(taken: Mapping[str, list[float]], usual: str, share: float = _SHARE) -> str:
    """The fastest way by its times; but `usual`, unless that takes at most `share` of its time."""
    typical = {name: typical_time(seconds) for name, seconds in taken.items()}
    best = min(typical, key=typical.__getitem__)
    return best if typical[best] <= share * typical[usual] else usual


def typical_time(seconds: Iterable[float]) -> float:
    """The time that work takes, by several measurements: the second shortest."""
    # Load makes it longer in some rounds. The shortest may be wrong, too.
    return sorted(seconds)[:2][-1]


def ways_to_multiply(layer: PackedLinear, rows: int, is_unpacked: bool = False) -> Ways:
    """The ways to multiply rows with a packed layer, which may have been unpacked before.

    Another kernel is another entry.
    """
    x = torch.ones(rows, layer.in_features)
    ways: dict[str, Callable[[], object]] = {"kernel": partial(layer.multiply_few, x.bfloat16())}
    for dtype in _UNPACKED:
        of_type = x.to(MatmulMethod(dtype).type)
        if is_unpacked:
            ways[dtype] = partial(torch.mm, of_type, layer.unpacked(of_type.dtype))
        else:
            ways[dtype] = partial(_unpack_and_multiply, of_type, layer)
    if has_own_products():
        own = _part_of(layer)
        own.matmul_method = MatmulMethod(own=ANY_ROWS)
        ways["own"] = partial(own.multiply_few, x)
    return ways


def ways_to_attend(shape: HeadShape) -> Ways:
    """Attention of a token over 1,024 cached ones, by the cache's number type."""
    query = torch.ones(1, shape.keys, shape.queries // shape.keys, shape.size)
    rows = torch.ones(1, shape.keys, _HELD, shape.size)
    ways: dict[str, Callable[[], object]] = {}
    for name in _TYPES:
        queries, keys = (x.to(getattr(torch, name)) for x in (query, rows))
        ways[name] = partial(F.scaled_dot_product_attention, queries, keys, keys)
    return ways


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


def _usual() -> Choices:
    return Choices(_TYPES[0], usual_method("bfloat16" if _has_bfloat16() else "float32"), {})


def _own_rows(choices: Choices) -> int:
    is_measured = any(work.startswith(_OWN) for work in choices.times)
    return choices.products.own if is_measured else _usual_own_rows()


def _usual_own_rows() -> int:
    # AMX multiplies many rows of bfloat16 in less time than they need in eight bits without it.
    may_use = not most_of_onednn() or "AMX" in most_of_onednn()
    return _OWN_STEPS[1] if may_use and torch.cpu._is_amx_tile_supported() else ANY_ROWS


def _has_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16, and oneDNN may use them."""
    # oneDNN alone says so with plain AVX-512, too, where it converts to float32.
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    of_x86 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_fast_bfloat16() and (of_x86 or not is_x86) and most_of_onednn() not in _CONVERTING


def _compute_alone() -> None:
    """Let this thread compute without others, so that its CPU time is that of all it computes."""
    # With more threads, it would count its own share, and a part of its waiting for the others.
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    call_in_new_thread(lambda: torch.set_num_threads(count))  # which threads to come use


@torch.inference_mode()
def _measured(module: nn.Module) -> Choices:
    usual, times = _usual(), dict[str, Mapping[str, float]]()

    def choose(work: str, ways: Ways, usual: str, share: float = _SHARE) -> str:
        taken = time_ways(ways)
        times[work] = {name: round(1000 * typical_time(taken[name]), 4) for name in taken}
        return fastest(taken, usual, share)

    cached = choose("attention", ways_to_attend(_heads_of(module)), usual.cache_type)
    four, eight = (_part_of(layer) for layer in _widest(module))
    products = _only(_UNPACKED, ways_to_multiply(four, _READ))
    chosen = choose(f"{_READ} rows", products, usual.products.dtype)
    method = usual_method("float32" if chosen == "float32" else "bfloat16")
    limits = {}
    for name, layer in (("few_4", four), ("few_8", eight), ("few", four)):
        limits[name] = _STEPS[0]
        for rows in _STEPS[1:]:
            ways = ways_to_multiply(layer, rows, is_unpacked=name == "few")
            ways = _only(("kernel", chosen), ways)
            before = "kernel" if rows <= getattr(method, name) else chosen
            if choose(f"{name}, {rows} rows", ways, before, _SHARE_AT_LIMIT) == chosen:
                break
            limits[name] = rows
    limits["own"] = 0
    for rows in _OWN_STEPS:
        if not has_own_products():
            break
        other = chosen if rows > limits["few_4"] else "kernel"
        ways = _only(("own", other), ways_to_multiply(four, min(rows, _READ)))
        before = "own" if rows <= _usual_own_rows() else other
        if choose(f"{_OWN}{rows}", ways, before, _SHARE_AT_LIMIT) == other:
            break
        limits["own"] = rows
    cache_type: CacheTypeName = "float16" if cached == "float16" else "bfloat16"
    return Choices(cache_type, MatmulMethod(method.dtype, **limits), times)


@torch.inference_mode()
def _is_right(module: nn.Module, kept: Choices) -> bool:
    """Whether no other number type, of the cache or of unpacked weights, takes a third less."""
    products = ways_to_multiply(_part_of(_widest(module)[0]), _READ)
    is_own = "own" in products
    chosen = "own" if is_own and _own_rows(kept) == ANY_ROWS else kept.products.dtype
    return all(
        fastest(time_ways(ways, _CHECKED), chosen) == chosen
        for ways, chosen in (
            (_only((*_UNPACKED, *("own",) * is_own), products), chosen),
            (ways_to_attend(_heads_of(module)), kept.cache_type),
        )
    )


def _only(names: Iterable[str], ways: Ways) -> Ways:
    return {name: ways[name] for name in names}


def _heads_of(module: Any) -> HeadShape:
    return head_shape(module.config)


def _widest(module: nn.Module) -> list[PackedLinear]:
    """The largest layer of four bits, and of eight; the other one if there is none."""
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    return [
        max(layers, key=lambda layer: (layer.bits == bits, layer.in_features * layer.out_features))
        for bits in (4, 8)
    ]


def _part_of(layer: PackedLinear) -> PackedLinear:
    """A layer with the first rows of a layer's weights."""
    most = max(1, _MOST // layer.in_features // _ALIGNED) * _ALIGNED
    count = min(most, layer.out_features)
    parts = (getattr(layer, name).narrow(dim, 0, count) for name, dim in layer.row_dims.items())
    part: PackedLinear = type(layer)(*(part.contiguous() for part in parts))
    return part


def _unpack_and_multiply(x: torch.Tensor, layer: PackedLinear) -> object:
    return x @ layer.unpacked(x.dtype)


def _path_for(module: nn.Module) -> Path:
    layers = [(layer.bits, layer.in_features, layer.out_features) for layer in _widest(module)]
    # Not the number of threads: it depends on the load, and a chat is to resume with the same type.
    machine = (torch.backends.cpu.get_cpu_capability(), most_of_onednn(), processor())
    about = repr((_heads_of(module), layers, machine, torch.__version__))
    return compiled_dir() / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.choices"


def _read(path: Path) -> Choices | None:
    """What was measured before; None if nothing was, or if the file is damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        choices = Choices(kept["cache_type"], MatmulMethod(**kept["products"]), kept["times"])
        dtype, *limits, own = choices.products
        times = [t for ways in choices.times.values() for t in ways.values()]
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    is_valid = choices.cache_type in _TYPES and dtype in _UNPACKED and set(limits) <= set(_STEPS)
    is_valid = is_valid and own in (0, *_OWN_STEPS)
    return choices if is_valid and all(isinstance(time, float) for time in times) else None


def _write(path: Path, choices: Choices) -> None:
    text = json.dumps(choices._asdict() | {"products": choices.products._asdict()})
    with suppress(OSError):  # measured again in the next chat
        write_private(private_dir(path.parent) / path.name, text, replaces=True)
