"""The library of the decode step in C++, built once in a run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_once import made_once
from sirchat.models import products

has_library = pytest.mark.skipif(
    not products.compiler() or not products.suits_processor(),
    reason="needs a C++ compiler and AVX2, AVX-512 or 64-bit ARM",
)


def built_library(factory: pytest.TempPathFactory) -> Path:
    """The file of the library, which is not loaded yet."""
    folder = factory.getbasetemp() / "native"
    folder.mkdir(exist_ok=True)
    path = folder / products.library_name()
    return path if path.exists() else made_once(factory, path, products.build_library)
