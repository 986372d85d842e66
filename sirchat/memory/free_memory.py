"""Tells how much memory is free, and the limits of control groups; gives freed memory back (glibc).

glibc keeps freed blocks for later use, and freed large blocks leave gaps between small ones. So a
program that reads or writes tensors on disk takes more memory than it needs.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePosixPath

# The files of a Linux control group of version 2 and 1: of its limit, and of what is used; and what
# `memory.stat` calls the cached files in it, which give way.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in glibc's malloc.h


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process, in its container, can still take; None if unknown."""
    free = list(_free_in_groups(root))
    with suppress(OSError, ValueError, LookupError):
        free.append(1024 * _numbers(root / "proc/meminfo")["MemAvailable:"])
    return min(free, default=None)


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield what is free in each control group of this process that has a limit."""
    for folder, (most, used, cached) in product(control_groups("memory", root), _GROUP_FILES):
        with suppress(OSError, ValueError, LookupError):  # such as "max"
            limit, taken = (int((folder / name).read_text("ascii")) for name in (most, used))
            yield max(0, limit - taken + _numbers(folder / "memory.stat")[cached])


def control_groups(kind: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folder of each Linux control group of this process that may limit `kind`."""
    lines = list[str]()
    with suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    for _, kinds, group in (line.split(":", 2) for line in lines):
        if kinds and kind not in kinds.split(","):  # version 2 has one group of all kinds
            continue
        # In a container the folder of its group may be the topmost one, whatever its path.
        for path in (PurePosixPath(group), *PurePosixPath(group).parents):
            yield root / "sys/fs/cgroup" / (kind if kinds else "") / path.relative_to("/")


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in the lines of a file, each after its name."""
    lines = path.read_text("ascii").splitlines()
    return {name: int(value) for name, value, *_ in map(str.split, lines)}


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
