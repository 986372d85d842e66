"""Gives memory that was freed back to the system.

glibc keeps what it has once had: after loading a model that may be twice the model itself.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return free memory to the system, where the C library has a function for it (glibc)."""
    if not sys.platform.startswith("linux"):
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return
    trim(0)
