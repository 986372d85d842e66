"""A file that takes long to make is made once in a run of the tests, by the first worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, path: Path, make: Callable[[Path], object]) -> Path:
    """Let `make` write the file at `path`, or copy what another worker's has written; its path."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        make(path)
        return path
    shared = factory.getbasetemp().parent / f"made-{path.name}"  # of this run alone
    with FileLock(f"{shared}.lock"):
        if shared.exists():
            shutil.copy(shared, path)
        else:
            make(path)
            shutil.copy(path, shared.with_suffix(".new"))
            shared.with_suffix(".new").rename(shared)
    return path
