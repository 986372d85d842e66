"""Compiles the decode step and the products in C++ while a model loads, and keeps the library.

Later starts load the kept library. It is machine code, so it is loaded only if no other user could
have written it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

from sirchat.errors import ModelError
from sirchat.models.captured_step import CapturedStep
from sirchat.models.decoder import Decoder
from sirchat.models.devices import onednn_isa_limit
from sirchat.models.gguf.blocks import NativePacking, unpack_floats
from sirchat.models.gguf.header import BLOCK_LAYOUTS, BLOCKS, GgufTensor
from sirchat.models.model import LoadedModel
from sirchat.models.native_step import NativeStep
from sirchat.models.packed import (
    GROUP,
    UNLIMITED_ROWS,
    BlockLinear,
    Int4Linear,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    has_fast_bfloat16,
    has_matrix_units,
    int4_block_rows,
    matmul_method_of,
    packing_layout,
    set_matmul_method,
)
from sirchat.models.progress import Progress
from sirchat.models.shape import compiler
from sirchat.paths import (
    compiled_dir,
    find_changeable_by_others,
    make_private_dir,
    with_tilde,
    write_private,
)

# `auto` compiles where that is possible, `on` or fails; `off` uses torch's operations alone.
CompileMode = Literal["auto", "on", "off"]
UnpackName = Literal["auto", "bfloat16", "float32"]

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_MAIN_SOURCE = Path(__file__).with_name("step.cpp")  # it includes the others
_DIGEST_BYTES = 32  # bytes of the SHA-256 at the end of a file of machine code
_MAX_PRODUCT_ERROR = 0.03  # eight bits of the inputs err by 0.005

_BUILD_PREFIX = "making-"  # the prefix of the temporary folders in which libraries are compiled
_AUTO_TIMEOUT = 60  # seconds that `auto` waits for the library; zig's first takes longer
_MAX_LIBRARIES = 8  # newest libraries, of several compilers, versions of torch and so on
_FAILURE_SECONDS = 24 * 3600  # for which a library that failed is not tried again
_ABANDONED_AFTER = 3600  # seconds after which an unfinished library counts as abandoned

_MAX_NATIVE_ROWS_WITH_AMX = 64
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN has bfloat16, but no instructions for it
_ISA_WITHOUT_BFLOAT16 = ("AVX512_CORE", "AVX512_CORE_VNNI")


def use_compiled(model: LoadedModel, mode: CompileMode, progress: Progress | None = None) -> None:
    """Let a model read single tokens in C++ on a CPU, or by a captured graph on a GPU.

    Raises ModelError if `mode` is `on` and that is impossible.
    """
    if model.device.type == "cuda":
        _use_captured(model, mode, progress)
    elif mode == "auto":
        _use_library(model, progress, _AUTO_TIMEOUT)
    elif mode == "on" and (problem := _use_library(model, progress)):
        raise ModelError(
            f"--compile on: {problem}",
            hint="choose --compile auto, which compiles only if possible",
        )


def _use_captured(model: LoadedModel, mode: CompileMode, progress: Progress | None) -> None:
    if mode == "off":
        model.use_decode_step(None)
        return
    if progress is not None:
        progress("preparing the decode step on the GPU", 0, None)
    if model.decode_step is None and mode == "on":
        raise ModelError(
            f"--compile on: {model.name!r} has no decode step for a GPU: {model.captured.problems}",
            hint="choose --compile auto, which does so only if possible",
        )


def describe_decode_step(model: LoadedModel) -> str:
    """Describe the model's compiled or captured decode step, or say why there is none."""
    if model.device.type == "cuda":
        step, problems = model.captured
        if step is None:
            return f"no: {problems}"
        return f"a CUDA graph of {step.body.description}" + (f" ({problems})" if problems else "")
    if problem := _use_library(model, None):
        return f"no: {problem}"
    used = model.decode_step
    if not isinstance(used, CapturedStep) or used.first_layers is None:
        return "yes"
    first, others = used.first_layers.count, used.body.description
    return f"{first} layers on the CPU in C++, the others in a CUDA graph of {others}"


def _use_library(model: LoadedModel, progress: Progress | None, timeout: float = -1) -> str:
    """Let the model compute with the library; returns why that failed, or ""."""
    can_step, method = NativeStep.supports(model.module), matmul_method_of(model.module)
    is_split = isinstance(model.module, Decoder) and model.module.model.cpu_layers > 0
    if not (can_step or is_split) and method is None:
        return f"sirchat can't compile model {model.name!r}"
    library = _open_library(progress, timeout)
    if isinstance(library, str):
        return library
    if method is not None:
        set_matmul_method(model.module, method._replace(max_native_rows=max_native_rows()))
    try:
        if is_split and model.decode_step is None:
            model.use_split_step(library)
            return model.captured.problems if model.decode_step is None else ""
        if can_step and model.decode_step is None:
            layers = model.encoder.layers
            step = NativeStep(library, model.module, model.cache_dtype, layers)
            model.use_decode_step(step)
    except ValueError as error:
        return f"the decode step has {error}"
    return ""


def wait_for_library() -> ctypes.CDLL | None:
    """The library once it is compiled; None if it can't be used."""
    library = _open_library(None, _AUTO_TIMEOUT)
    return None if isinstance(library, str) else library


def _open_library(progress: Progress | None, timeout: float) -> ctypes.CDLL | str:
    """The library, compiled if necessary, or the reason why it can't be used."""
    path = compiled_dir() / library_name()
    if progress is not None and not path.is_file():
        progress("compiling the decode step, some seconds", 0, None)
    if problem := ensure_library(timeout, path):
        return problem
    try:
        if suspect := find_changeable_by_others(path):
            return f"{with_tilde(suspect)} could have been changed by others, so it is not loaded"
        return load_library(path)
    except DamagedProgramError:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            return f"{with_tilde(path)} is damaged and can't be deleted: {error.strerror}"
        return _open_library(progress, timeout)
    except WrongProgramError as error:
        _record_failure(path, str(error))
        return str(error)
    except Exception as error:  # whatever hinders that machine code is loaded
        return f"it can't be loaded now: {_last_line(error)}"


def compile_in_background() -> None:
    threading.Thread(target=ensure_library, name="compiling", daemon=True).start()


def ensure_library(timeout: float = -1, path: Path | None = None) -> str:
    """Compile the library, the file `path`, unless it exists; returns why that failed, or "".

    Waits for another thread or process that compiles, at most `timeout` seconds; -1 means no limit.
    An error is kept in a file, so that for a day later starts do not try again.
    """
    path = path or compiled_dir() / library_name()
    if path.is_file():
        return ""
    if not supports_processor():
        return "it needs a processor with AVX2, AVX-512, or 64-bit ARM"
    if not compiler():
        return "there is no C++ compiler ($CXX, g++, clang++, or pip install 'sirchat[fast]')"
    lock = FileLock(path.with_suffix(".lock"), mode=0o600, thread_local=False)
    try:
        make_private_dir(path.parent)
        with lock.acquire(timeout=timeout):
            try:
                return "" if path.is_file() else _read_failure(path) or _build(path)
            finally:
                with suppress(OSError):  # Windows deletes no file that is open
                    Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        return "it is still being compiled"
    except OSError as error:
        return f"compiling fails: {error.strerror or error}"


def _build(path: Path) -> str:
    _delete_leftovers(path.parent)
    with tempfile.TemporaryDirectory(prefix=_BUILD_PREFIX, dir=path.parent) as folder:
        library = Path(folder) / path.name
        try:
            build_library(library)
        except RuntimeError as error:
            problem = f"compiling fails: {_last_line(error)}"
            _record_failure(path, problem)
            return problem
        library.chmod(0o600)
        os.replace(library, path)
    return ""


def _delete_leftovers(folder: Path) -> None:
    """Delete files of killed processes, and old libraries."""
    for build in folder.glob(f"{_BUILD_PREFIX}*"):
        with suppress(OSError):  # another process sweeps, too
            if time.time() - build.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(build, ignore_errors=True)
    with suppress(OSError):
        libraries = [file for file in folder.iterdir() if file.suffix in (".so", ".failed")]
        libraries.sort(key=lambda file: file.stat().st_mtime)
        for old in libraries[: 1 - _MAX_LIBRARIES]:  # one more is being made
            old.unlink(missing_ok=True)


def _record_failure(path: Path, problem: str) -> None:
    """Delete a library and keep its error in a file: for a day, no start compiles it again."""
    failure = path.with_suffix(".failed")
    message = f"{problem} (delete {with_tilde(failure)} to try again)"
    with suppress(OSError):  # if nothing can be written, later starts try again
        path.unlink(missing_ok=True)
        write_private(failure, message, replaces=True)


def _read_failure(path: Path) -> str:
    failure = path.with_suffix(".failed")
    with suppress(OSError):
        if time.time() - failure.stat().st_mtime < _FAILURE_SECONDS:
            return failure.read_text(encoding="utf-8")
    return ""


def _last_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__)[:500]


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


class DamagedProgramError(Exception):
    """A file of machine code is incomplete, or was changed."""


class WrongProgramError(Exception):
    """Machine code computes wrong results."""


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library, and compare its products with torch's.

    Raises DamagedProgramError, WrongProgramError, or any error if it can't be loaded now.
    """
    about = path.stat()
    return _load_checked(path, about.st_ino, about.st_size, about.st_mtime_ns)


@cache  # a start needs the library for packing, and then for the decode step
def _load_checked(path: Path, *_identity: int) -> ctypes.CDLL:
    check_digest(path)
    library = ctypes.CDLL(str(path))
    _compare_with_torch(library)
    return library


def check_digest(path: Path) -> None:
    """Raise DamagedProgramError if a file is not as `build_library` wrote it."""
    content = path.read_bytes()  # loading an incomplete file can kill the process
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise DamagedProgramError


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
        layers.append(NativePacking(library).pack_blocks(tensor, torch.arange(32)))
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


def processor_name() -> str:
    return cpuinfo("model name") or platform.processor() or platform.machine()


@cache
def cpuinfo(*names: str) -> str:
    """The first value in Linux's /proc/cpuinfo whose key begins with one of `names`, or ""."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""
