"""The processor: its name and features, and how packed weights are multiplied fastest by these."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from sirchat.models.devices import onednn_isa_limit
from sirchat.models.packed import (
    ANY_ROWS,
    MatmulMethod,
    has_fast_bfloat16,
    has_tiles,
    matmul_method_of,
    set_matmul_method,
)

UnpackName = Literal["auto", "bfloat16", "float32"]

_OWN_WITH_AMX = 64  # rows
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN has bfloat16, but no instructions for it
_CONVERTING = ("AVX512_CORE", "AVX512_CORE_VNNI")


class Features(NamedTuple):
    """What the processor has for products of packed weights, less what the environment hides."""

    capability: str  # torch's name: AVX512, AVX2, DEFAULT, ...
    has_bfloat16: bool  # instructions for products of bfloat16
    has_amx: bool


def features() -> Features:
    """The features of this processor that may be used."""
    is_x86, most = platform.machine().lower() in ("x86_64", "amd64"), onednn_isa_limit()
    has_amx = torch.cpu._is_amx_tile_supported()
    # oneDNN alone says that it has bfloat16 with plain AVX-512, too, where it converts to float32.
    has_bfloat16 = has_fast_bfloat16() and most not in _CONVERTING
    if is_x86:
        has_bfloat16 = has_bfloat16 and (torch.cpu._is_avx512_bf16_supported() or has_amx)
    capability = torch.backends.cpu.get_cpu_capability()
    return Features(capability, has_bfloat16, has_amx and (not most or "AMX" in most))


def fastest_method(found: Features, unpack: UnpackName = "auto") -> MatmulMethod:
    """How packed weights are multiplied with such features, if `products.cpp` is loaded."""
    if unpack == "auto":
        unpack = "bfloat16" if found.has_bfloat16 else "float32"
    # AMX multiplies many rows of bfloat16 in less time than they need in eight bits without it.
    own = _OWN_WITH_AMX if found.has_amx else ANY_ROWS
    if unpack == "bfloat16":
        return MatmulMethod(own=own)
    # The kernels are twice as fast with AVX-512 as with AVX2; products in float32 are not.
    few = 64 if found.capability == "AVX512" else 32
    return MatmulMethod(unpack, few_4=64, few_8=few, few=few, own=own)


def choose_matmul_method(module: nn.Module, unpack: UnpackName) -> None:
    """Choose how packed layers multiply: the fastest way, or as the setting `unpack_dtype` says."""
    if matmul_method_of(module) is not None:
        method = fastest_method(features(), unpack)
        set_matmul_method(module, method._replace(own=0))  # until `products.cpp` is loaded


def own_rows() -> int:
    """Up to how many rows `products.cpp` is to multiply, once it is loaded."""
    return ANY_ROWS if has_tiles() else fastest_method(features()).own


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
