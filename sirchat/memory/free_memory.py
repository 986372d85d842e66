"""Returns memory that the process has freed to the system, if the C library is glibc.

glibc keeps freed blocks for later use. Where large blocks come and go while small ones stay, as
with tensors that are read from disk or written to it, the process grows without need.
"""

from __future__ import annotations

import ctypes
import sys


def trim_memory() -> None:
    """Return free memory to the system; this takes a few milliseconds.

    Without effect if the C library has no function for it.
    """
    _call_glibc("malloc_trim", 0)


def free_large_blocks_at_once() -> None:
    """From now on, return each freed block of a megabyte or more to the system at once (glibc).

    Weights that are read from disk for every pass would else leave gaps in the heap.
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
