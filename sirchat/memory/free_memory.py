"""Gives freed memory back to the operating system, if the C library is glibc.

glibc keeps freed blocks for later use. A program that frees large blocks, but not the small blocks
between them, takes more memory than it needs. This happens when tensors are read from disk or
written to disk.
"""

from __future__ import annotations

import ctypes
import sys


def trim_memory() -> None:
    """Give freed memory back to the operating system; this takes a few milliseconds.

    Does nothing if the C library is not glibc.
    """
    _call_glibc("malloc_trim", 0)


def free_large_blocks_at_once() -> None:
    """Tell glibc to give freed blocks of a megabyte or more back to the operating system at once.

    Without this, weights that are read from disk for every forward pass would leave gaps in the
    heap. Does nothing if the C library is not glibc.
    """
    _call_glibc("mallopt", _MMAP_THRESHOLD, 2**20)


_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in glibc's malloc.h


def _call_glibc(name: str, *arguments: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # another C library
        return
    function(*arguments)
