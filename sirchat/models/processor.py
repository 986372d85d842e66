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
    UNLIMITED_ROWS,
    MatmulMethod,
    has_fast_bfloat16,
    has_matrix_units,
    matmul_method_of,
    set_matmul_method,
)

UnpackName = Literal["auto", "bfloat16", "float32"]

_MAX_NATIVE_ROWS_WITH_AMX = 64
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN has bfloat16, but no instructions for it
_ISA_WITHOUT_BFLOAT16 = ("AVX512_CORE", "AVX512_CORE_VNNI")


class Features(NamedTuple):
    """What the processor has for products of packed weights, less what the environment hides."""

    capability: str  # torch's name: AVX512, AVX2, DEFAULT, ...
    has_bfloat16: bool  # instructions for products of bfloat16
    has_amx: bool


def processor_features() -> Features:
    """The features of this processor that may be used."""
    is_x86, isa_limit = platform.machine().lower() in ("x86_64", "amd64"), onednn_isa_limit()
    has_amx = torch.cpu._is_amx_tile_supported()
    # oneDNN alone says that it has bfloat16 with plain AVX-512, too, where it converts to float32.
    has_bfloat16 = has_fast_bfloat16() and isa_limit not in _ISA_WITHOUT_BFLOAT16
    if is_x86:
        has_bfloat16 = has_bfloat16 and (torch.cpu._is_avx512_bf16_supported() or has_amx)
    capability = torch.backends.cpu.get_cpu_capability()
    return Features(capability, has_bfloat16, has_amx and (not isa_limit or "AMX" in isa_limit))


def fastest_method(features: Features, unpack: UnpackName = "auto") -> MatmulMethod:
    """How packed weights are multiplied with such features, if `products.cpp` is loaded."""
    if unpack == "auto":
        unpack = "bfloat16" if features.has_bfloat16 else "float32"
    # AMX multiplies many rows of bfloat16 in less time than they need in eight bits without it.
    native_rows = _MAX_NATIVE_ROWS_WITH_AMX if features.has_amx else UNLIMITED_ROWS
    if unpack == "bfloat16":
        return MatmulMethod(max_native_rows=native_rows)
    # The kernels are twice as fast with AVX-512 as with AVX2; products in float32 are not.
    kernel_rows = 64 if features.capability == "AVX512" else 32
    return MatmulMethod(unpack, 64, kernel_rows, kernel_rows, native_rows)


def choose_matmul_method(module: nn.Module, unpack: UnpackName) -> None:
    """Choose how packed layers multiply: the fastest way, or as the setting `unpack_dtype` says."""
    if matmul_method_of(module) is not None:
        fastest = fastest_method(processor_features(), unpack)
        before_compiling = fastest._replace(max_native_rows=0)  # `products.cpp` is not loaded yet
        set_matmul_method(module, before_compiling)


def max_native_rows() -> int:
    """Up to how many rows `products.cpp` is to multiply, once it is loaded."""
    if has_matrix_units():
        return UNLIMITED_ROWS
    return fastest_method(processor_features()).max_native_rows


def processor_name() -> str:
    """The processor's name."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """The first value of Linux's /proc/cpuinfo whose key begins with one of `names`; "" if none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""
