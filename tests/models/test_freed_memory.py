"""Freed memory goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sirchat.memory.free_memory import trim_memory


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_small_pieces_left_is_given_back() -> None:
    pieces = [bytearray(50_000) for _ in range(4_000)]  # below the size that is mapped apart
    last = bytearray(50_000)  # keeps the heap from shrinking by itself
    pieces.clear()
    before = resident()
    trim_memory()
    assert resident() < before - 100_000_000
    del last


def test_another_c_library_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    trim_memory()
