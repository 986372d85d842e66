"""The library of the decode step in C++, built once for all runs of the tests."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from sirchat.models import compiling, shape
from sirchat.models.model import LoadedModel
from sirchat.models.native_step import NativeStep

_BUILT = Path(__file__).parents[2] / ".pytest_cache" / "built"
CAN_BUILD = bool(shape.compiler() and compiling.supports_processor())
has_library = pytest.mark.skipif(
    not CAN_BUILD, reason="needs a C++ compiler and AVX2, AVX-512 or 64-bit ARM"
)


def built_library() -> Path:
    """The file of the library, which is not loaded yet; its name tells of what it was built."""
    path = _BUILT / compiling.library_name()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            compiling.build_library(path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
    return path


def copying_compiler(folder: Path) -> Path:
    """A compiler in a new folder which takes no time: it copies the library that was built."""
    folder.mkdir()
    code, compiler = folder / "code", folder / "compiler"
    code.write_bytes(built_library().read_bytes()[:-32])  # less the digest
    compiler.write_text(f'#!/bin/sh\nfor out; do :; done\ncp {code} "$out"\n')
    compiler.chmod(0o700)
    return compiler


@cache
def loaded_library() -> ctypes.CDLL:
    """The library, not compared with torch: that takes most of a second, and has its own tests."""
    return ctypes.CDLL(str(built_library()))


def read_in_native_code(model: LoadedModel) -> None:
    """Let a model read single tokens as chats do: three times as fast as by torch's operations."""
    if CAN_BUILD and NativeStep.supports(model.module):
        how = model.module, model.cache_dtype, model.encoder.layers
        model.use_decode_step(NativeStep(loaded_library(), *how))
