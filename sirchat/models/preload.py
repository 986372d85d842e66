"""Maps torch's library into memory without Python's lock, so that other threads go on meanwhile."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path


def preload_torch() -> None:
    """Load torch's largest library, on Linux; `import torch` then finds it loaded.

    An import, and ctypes' own loading, hold the lock for some tenths of a second: no key would be
    echoed. A call of a C function does not. Whatever fails here is left to the import.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    with suppress(ImportError, AttributeError, OSError):
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return
        library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
        load = ctypes.CDLL(None).dlopen
        load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        load(os.fsencode(library), os.RTLD_NOW)
