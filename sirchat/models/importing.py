"""Imports torch sooner: its largest library in another thread, and parts of it only on demand."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# Parts of torch that `import torch` imports, in a fifth of its time, and no chat with a `Decoder`
# needs: what operations compute without data, and `torch.export`.
_LATER = ("torch._meta_registrations", "torch.export")
# What they would import, without which `torch.Generator()` fails.
_NEEDED_NOW = "torch._prims.rng_prims"
# What may need them without naming them.
_NEED_ALL = (
    "transformers",
    "accelerate",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot",
)


def preload_torch() -> None:
    """On Linux, load torch's largest library by `dlopen`, which does not hold Python's lock (GIL).

    An import would hold it for some tenths of a second, in which the prompt could echo no key.
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


def defer_parts_of_torch() -> None:
    """Let `import torch` leave out parts, which are imported when they are used or may be."""
    if "torch" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds modules for Python's import system: of those in `_LATER` only the name."""

    def __init__(self) -> None:
        self.waiting = dict[str, ModuleType]()
        self._loaders = dict[str, Any]()
        self._lock = threading.RLock()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(_NEED_ALL) and "torch" in sys.modules:
            self.import_waiting()
        if name not in _LATER or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Later(spec.name)
        module.__dict__["_finder"] = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.waiting[module.__name__] = module
        with suppress(ImportError):
            import_module(_NEEDED_NOW)

    def import_waiting(self) -> None:
        """Import what waits; another thread waits until all of it is there."""
        with self._lock:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            while self.waiting:
                name, module = self.waiting.popitem()
                self._loaders[name].exec_module(module)


class _Later(ModuleType):
    """A module that is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # those are of the import system
            self.__dict__["_finder"].import_waiting()
            with suppress(KeyError):
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
