"""Builds and loads `products.cpp`: products of packed weights that are never unpacked, attention.

It becomes a library of machine code beside the compiled decode steps, and defines operators of
torch, which the compiled steps can call, too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from itertools import product
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sirchat.models.packed import (
    GROUP,
    Int4Linear,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    four_bit_block,
    has_own_products,
    packing_layout,
)
from sirchat.models.processor import cpuinfo, processor

SOURCE = Path(__file__).with_name("products.cpp")

_OPERATORS = ("multiply_4", "multiply_8", "attend")
_DIGEST = 32  # bytes of the SHA-256 at the end of a file of machine code
_TOLERANCE = 0.03  # eight bits of the inputs err by 0.005


class DamagedProgramError(Exception):
    """A file of machine code is incomplete, or was changed."""


class WrongProgramError(Exception):
    """Machine code computes something else than it should."""


def compiler() -> str | None:
    """The path of this machine's C++ compiler."""
    return shutil.which(os.environ.get("CXX", "g++"))


def suits_processor() -> bool:
    """Whether `products.cpp` is written for this processor: AVX2, AVX-512, or 64-bit ARM."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return packing_layout() == "blocks of 16, pairs of rows"
    return "AVX" in torch.backends.cpu.get_cpu_capability() and four_bit_block() > 0


def library_name() -> str:
    """The name of the library's file: a hash of all that it depends on."""
    made_by = None
    if (path := compiler()) is not None:
        with suppress(OSError):
            about = os.stat(path)
            made_by = (path, about.st_size, about.st_mtime_ns)
    machine = (torch.__version__, processor(), cpuinfo("flags", "Features"), *_flags())
    all_of_it = repr((SOURCE.read_bytes(), made_by, machine))
    return f"products-{hashlib.sha256(all_of_it.encode()).hexdigest()[:24]}.so"


def build_library(path: Path) -> None:
    """Compile the library into the file `path`, some seconds; RuntimeError has the compiler's."""
    include, lib = Path(torch.__file__).parent / "include", _torch_library().parent
    folders = [f"-I{include}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    command = [compiler() or "g++", *_flags(), *folders, str(SOURCE), "-ltorch_cpu", "-o"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    sign(path)


def sign(path: Path) -> None:
    """Append its SHA-256 to a file of machine code."""
    code = path.read_bytes()
    path.write_bytes(code + hashlib.sha256(code).digest())


def refuse_damaged(path: Path) -> None:
    """Raise DamagedProgramError if a file is not as `sign` left it."""
    written = path.read_bytes()  # loading an incomplete file can kill the process
    if hashlib.sha256(written[:-_DIGEST]).digest() != written[-_DIGEST:]:
        raise DamagedProgramError


def load_library(path: Path) -> None:
    """Load the library, once in a process, and compare its products with torch's.

    Raises DamagedProgramError, WrongProgramError, or any error if it can't be loaded now.
    """
    if not has_own_products():
        refuse_damaged(path)
        # so that the library, and then compiled programs, find the functions that they call
        for library in (_torch_library(), path):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    _compare_with_torch()


def declarations() -> dict[Any, list[str]]:
    """The C functions of the operators, for programs that call them without torch's dispatcher.

    From then on torch can export graphs with them.
    """
    if not has_own_products():
        return {}
    _tell_shapes()
    inputs, found = ", ".join(["AtenTensorHandle"] * 3), dict[Any, list[str]]()
    for name in _OPERATORS:
        function = f"AOTITorchError aoti_torch_cpu_{name}({inputs}, AtenTensorHandle*)"
        found[getattr(torch.ops.sirchat, name).default] = [function]
    return found


@torch.inference_mode()
def _compare_with_torch() -> None:
    block, columns = four_bit_block(), 5 * GROUP
    q = (7 * torch.arange(2 * block * columns) // 3).view(-1, columns) % 16
    scale = torch.linspace(0.1, 0.2, len(q) * 5).view(-1, 5)
    four = Int4Linear.of_values(q.to(torch.uint8), scale, -7 * scale)
    eight = Int8Linear((17 * q - 127)[:-3].to(torch.int8), scale[:-3, 0].bfloat16())
    layers: list[PackedLinear] = [four, eight]
    for layer, rows in product(layers, (1, 19)):
        x = torch.linspace(-2, 3, rows * columns).sin_().view(rows, columns)
        wanted = layer.multiply_few(x).float()
        layer.matmul_method = MatmulMethod(own=rows)
        error = (layer.multiply_few(x) - wanted).norm() / wanted.norm()
        layer.matmul_method = MatmulMethod()
        if not error < _TOLERANCE:  # NaN, too
            raise WrongProgramError(f"products of the compiled library err by {error:.2g}")
    keys, values = torch.linspace(-9, 9, 2 * 2 * 150 * 64).sin_().view(2, 2, 150, 64).bfloat16()
    queries = torch.linspace(3, -2, 2 * 5 * 64).view(2, 5, 64)
    weights = (queries @ keys.float().mT * log(2)).softmax(-1)
    wanted = weights @ values.float()
    error = (torch.ops.sirchat.attend(queries, keys, values) - wanted).norm() / wanted.norm()
    if not error < _TOLERANCE:
        raise WrongProgramError(f"attention of the compiled library errs by {error:.2g}")


@cache
def _tell_shapes() -> None:
    for name in _OPERATORS:  # a tenth of a second each, which only compiling needs
        shape = _shape_of_attention if name == "attend" else _shape_of_product
        torch.library.register_fake(f"sirchat::{name}", shape)


def _shape_of_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(len(x), len(packed), dtype=torch.float32)


def _shape_of_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(queries)


def _torch_library() -> Path:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"


def _flags() -> list[str]:
    flags = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    if platform.machine().lower() in ("arm64", "aarch64"):
        return [*flags, "-mcpu=native"]
    flags.append("-march=native")
    # torch, and so the layout of its four-bit weights, may be restricted to less than there is
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        flags.append("-mno-avx512f")
    return flags
