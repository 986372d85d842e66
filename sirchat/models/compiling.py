"""Compiles the decode step and the products in C++ while a model loads, and keeps the library.

Later starts load the kept library. It is machine code, so it is loaded only if no other user could
have written it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from sirchat.errors import ModelError
from sirchat.models.model import LoadedModel
from sirchat.models.native_step import NativeStep
from sirchat.models.packed import matmul_method_of, set_matmul_method
from sirchat.models.processor import max_native_rows
from sirchat.models.products import (
    DamagedProgramError,
    WrongProgramError,
    build_library,
    library_name,
    load_library,
    supports_processor,
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

_BUILD_PREFIX = "making-"  # the prefix of the temporary folders in which libraries are compiled
_AUTO_TIMEOUT = 60  # seconds that `auto` waits for the library; zig's first takes longer
_MAX_LIBRARIES = 8  # newest libraries, of several compilers, versions of torch and so on
_ABANDONED_AFTER = 3600  # seconds after which an unfinished library counts as abandoned

# Errors that may not recur at a later start
_TEMPORARY_ERRORS = (
    *("No space left", "Disk quota", "Read-only file system", "Permission denied"),
    *("Killed signal", "terminated with signal", "File size limit", "Input/output error"),
    *("allocate memory", "out of memory", "memory exhausted"),
)


def compile_in_background() -> None:
    threading.Thread(target=ensure_library, name="compiling", daemon=True).start()


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
        model.__dict__["decode_step"] = None
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
    problem = _use_library(model, None)
    return f"no: {problem}" if problem else "yes"


def ensure_library(timeout: float = -1) -> str:
    """Compile the library unless it exists; returns why that failed, or "".

    Waits for another thread or process that compiles, at most `timeout` seconds; -1 means no limit.
    A permanent error is kept in a file, so that later starts do not try again.
    """
    path = compiled_dir() / library_name()
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
            for line in str(error).splitlines():  # a linker's reason is not in the last one
                if any(text in line for text in _TEMPORARY_ERRORS):
                    return f"compiling fails: {line[:500]}"
            problem = f"compiling fails: {_last_line(error)}"
            _record_failure(path, problem)
            return problem
        library.chmod(0o600)
        os.replace(library, path)
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
    if problem := ensure_library(timeout):
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


def _use_library(model: LoadedModel, progress: Progress | None, timeout: float = -1) -> str:
    """Let the model compute with the library; returns why that failed, or ""."""
    can_step, method = NativeStep.supports(model.module), matmul_method_of(model.module)
    if not can_step and method is None:
        return f"sirchat can't compile model {model.name!r}"
    library = _open_library(progress, timeout)
    if isinstance(library, str):
        return library
    if method is not None:
        set_matmul_method(model.module, method._replace(max_native_rows=max_native_rows()))
    try:
        if can_step and model.decode_step is None:
            layers = model.encoder.layers
            step = NativeStep(library, model.module, model.cache_dtype, layers)
            model.__dict__["decode_step"] = step  # as if it were computed
    except ValueError as error:
        return f"the decode step has {error}"
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
    """Delete a library and keep its error in a file, so that later starts do not compile it."""
    failure = path.with_suffix(".failed")
    message = f"{problem} (delete {with_tilde(failure)} to try again)"
    with suppress(OSError):  # if nothing can be written, later starts try again
        path.unlink(missing_ok=True)
        write_private(failure, message, replaces=True)


def _read_failure(path: Path) -> str:
    try:
        return path.with_suffix(".failed").read_text(encoding="utf-8")
    except OSError:
        return ""


def _last_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__)[:500]
