"""Gives freed memory back to the operating system, if the C library is glibc.

glibc keeps freed blocks for later use, and freed large blocks leave gaps between small ones. So a
program that reads or writes tensors on disk takes more memory than it needs.
"""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in glibc's malloc.h


def trim_memory() -> None:
    """Give freed memory back to the operating system, which takes a few milliseconds."""
    _call_glibc("malloc_trim", 0)


def free_large_blocks_at_once() -> None:
    """From now on, give freed blocks of a megabyte or more back at once."""
    # Else weights that are read from disk for every forward pass would leave gaps in the heap.
    _call_glibc("mallopt", _MMAP_THRESHOLD, 2**20)


def _call_glibc(name: str, *arguments: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # another C library
        return
    function(*arguments)
