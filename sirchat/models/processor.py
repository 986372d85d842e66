"""The processor's name and features, and the fastest way to multiply packed weights on it."""

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
    """The processor's features for products of packed weights that the environment allows."""

    capability: str  # torch's name: AVX512, AVX2, DEFAULT, ...
    has_bfloat16: bool  # instructions for products of bfloat16
    has_amx: bool


def processor_features() -> Features:
    is_x86, isa_limit = platform.machine().lower() in ("x86_64", "amd64"), onednn_isa_limit()
    has_amx = torch.cpu._is_amx_tile_supported()
    # oneDNN alone says that it has bfloat16 with plain AVX-512, too, where it converts to float32.
    has_bfloat16 = has_fast_bfloat16() and isa_limit not in _ISA_WITHOUT_BFLOAT16
    if is_x86:
        has_bfloat16 = has_bfloat16 and (torch.cpu._is_avx512_bf16_supported() or has_amx)
    capability = torch.backends.cpu.get_cpu_capability()
    return Features(capability, has_bfloat16, has_amx and (not isa_limit or "AMX" in isa_limit))


def fastest_method(features: Features, unpack: UnpackName = "auto") -> MatmulMethod:
    """How to multiply packed weights on a processor with these features and `products.cpp`."""
    if unpack == "auto":
        unpack = "bfloat16" if features.has_bfloat16 else "float32"
    # AMX multiplies many rows of bfloat16 in less time than they need in eight bits without it.
    native_rows = _MAX_NATIVE_ROWS_WITH_AMX if features.has_amx else UNLIMITED_ROWS
    if unpack == "bfloat16":
        return MatmulMethod(max_native_rows=native_rows)
    # The kernels are twice as fast with AVX-512 as with AVX2; products in float32 are not.
    kernel_rows = 64 if features.capability == "AVX512" else 32
    return MatmulMethod(unpack, 64, kernel_rows, native_rows)


def choose_matmul_method(module: nn.Module, unpack: UnpackName) -> None:
    """Let packed layers multiply in the fastest way, or as the setting `unpack_dtype` says."""
    if matmul_method_of(module) is not None:
        fastest = fastest_method(processor_features(), unpack)
        before_compiling = fastest._replace(max_native_rows=0)  # `products.cpp` is not loaded yet
        set_matmul_method(module, before_compiling)


def max_native_rows() -> int:
    """The most rows that the loaded `products.cpp` should multiply."""
    if has_matrix_units():
        return UNLIMITED_ROWS
    return fastest_method(processor_features()).max_native_rows


def processor_name() -> str:
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """The first value in Linux's /proc/cpuinfo whose key begins with one of `names`, or ""."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""
