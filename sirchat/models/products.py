"""Builds and loads the library of `step.cpp` and `products.cpp`.

The library has the decode step, and operators of torch that multiply packed weights with many rows
without unpacking them.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import subprocess
import sys
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import torch

from sirchat.models.gguf.blocks import NativePacking, unpack_floats
from sirchat.models.gguf.header import BLOCK_LAYOUTS, BLOCKS, GgufTensor
from sirchat.models.packed import (
    GROUP,
    BlockLinear,
    Int4Linear,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    int4_block_rows,
    packing_layout,
)
from sirchat.models.processor import cpuinfo, processor_features, processor_name
from sirchat.models.shape import compiler

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_MAIN_SOURCE = Path(__file__).with_name("step.cpp")  # it includes the others
_DIGEST_BYTES = 32  # bytes of the SHA-256 at the end of a file of machine code
_MAX_PRODUCT_ERROR = 0.03  # eight bits of the inputs err by 0.005


class DamagedProgramError(Exception):
    """A file of machine code is incomplete, or was changed."""


class WrongProgramError(Exception):
    """Machine code computes wrong results."""


def supports_processor() -> bool:
    """Whether `products.cpp` is written for this processor: AVX2, AVX-512, or 64-bit ARM."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return packing_layout() == "blocks of 16, pairs of rows"
    return "AVX" in torch.backends.cpu.get_cpu_capability() and int4_block_rows() > 0


def library_name() -> str:
    """The library's file name: a hash of everything that its machine code depends on."""
    compiler_identity: list[object] = [*compiler()]
    with suppress(OSError, IndexError):
        file_stat = os.stat(compiler()[0])
        compiler_identity += [file_stat.st_size, file_stat.st_mtime_ns]
    machine = (torch.__version__, processor_name(), cpuinfo("flags", "Features"), *_flags())
    dependencies = repr(([source.read_bytes() for source in _SOURCES], compiler_identity, machine))
    return f"step-{hashlib.sha256(dependencies.encode()).hexdigest()[:24]}.so"


def build_library(path: Path) -> None:
    """Compile the library into the file `path`, which takes some seconds.

    Raises RuntimeError with the compiler's message, and OSError if the compiler was killed.
    """
    include, lib = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    folders = [f"-I{include}", f"-L{lib}"]
    if sys.platform != "win32":
        folders.append(f"-Wl,-rpath,{lib}")
    command = [*compiler(), *_flags(), *folders, str(_MAIN_SOURCE), "-ltorch_cpu", "-o"]
    env = {**os.environ, "LC_ALL": "C"}  # errors are told apart by their words
    result = subprocess.run([*command, str(path)], capture_output=True, text=True, env=env)
    if result.returncode < 0:
        raise OSError(errno.EINTR, "the compiler was killed")
    if result.returncode:
        raise RuntimeError(result.stderr.strip() or f"{command[0]} ended with {result.returncode}")
    code = path.read_bytes()
    path.write_bytes(code + hashlib.sha256(code).digest())


def check_digest(path: Path) -> None:
    """Raise DamagedProgramError if a file is not as `build_library` wrote it."""
    content = path.read_bytes()  # loading an incomplete file can kill the process
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise DamagedProgramError


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library, and compare its products with torch's.

    Raises DamagedProgramError, WrongProgramError, or any error if it can't be loaded now.
    """
    check_digest(path)
    library = ctypes.CDLL(str(path))
    _compare_with_torch(library)
    return library


@torch.inference_mode()
def _compare_with_torch(library: ctypes.CDLL) -> None:
    block, columns = int4_block_rows(), 5 * GROUP
    q = (7 * torch.arange(2 * block * columns) // 3).view(-1, columns) % 16
    scale = torch.linspace(0.1, 0.2, len(q) * 5).view(-1, 5)
    four = Int4Linear.from_values(q.to(torch.uint8), scale, -7 * scale)
    eight = Int8Linear((17 * q - 127)[:-3].to(torch.int8), scale[:-3, 0].bfloat16())
    layers: list[PackedLinear] = [four, eight]
    for kind in BLOCK_LAYOUTS:
        shape = 32, BLOCK_LAYOUTS[kind].columns * 5
        _, each, size = BLOCKS[kind]
        content = (37 * np.arange(prod(shape) // each * size) % 60).astype(np.uint8)
        tensor = GgufTensor(shape, kind, content)  # its floats are at most 0.98
        layers.append(NativePacking(library).pack_blocks(tensor, torch.arange(32), torch.empty))
        if not torch.equal(layers[-1].unpacked(torch.float32).T, unpack_floats(tensor)):
            raise WrongProgramError(f"the compiled library changes weights in {kind}")
    for layer, rows in product(layers, (1, 19, 40)):
        x = torch.linspace(-2, 3, rows * layer.in_features).sin_().view(rows, -1)
        is_block = isinstance(layer, BlockLinear)
        expected = x @ layer.unpacked(x.dtype) if is_block else layer.multiply_packed(x).float()
        layer.matmul_method = MatmulMethod(max_native_rows=rows)
        error = (layer.multiply_packed(x) - expected).norm() / expected.norm()
        layer.matmul_method = MatmulMethod()
        if not error < _MAX_PRODUCT_ERROR:  # NaN, too
            raise WrongProgramError(f"products of the compiled library err by {error:.2g}")


def _flags() -> list[str]:
    flags = ["-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math"]
    # what matters of -O3, in five sixths of its time
    flags += ["-fpeel-loops", "-ftree-vectorize", "-fvect-cost-model=dynamic"]
    flags += ["-shared", "-fPIC", "-pthread"]
    if platform.machine().lower() in ("arm64", "aarch64"):
        return [*flags, "-mcpu=native"]
    flags += ["-march=native", *["-DWITH_TILES"] * processor_features().has_amx]
    # torch, and so the layout of its four-bit weights, may be restricted to less than there is
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        flags.append("-mno-avx512f")
    return flags
