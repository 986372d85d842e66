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

# Parts of torch that `import torch` imports, in a sixth of its time, and no chat with a `Decoder`
# needs: what operations compute without data, and `torch.export`.
_LATER = ("torch._meta_registrations", "torch.export")
_VERSION = "2.13."  # of torch, for which that was tried; another is imported as a whole
# What may need them without naming them. They import none of these, so no threads wait in a circle.
_NEED_ALL = (
    "transformers",
    "accelerate",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot",
    "torch.export.",
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
    """Finds modules for Python's import system: of those in `_LATER`, at first, only the name."""

    def __init__(self) -> None:
        self._left_out = set[str]()
        self._at_work = set[int]()  # identifiers of threads
        self._replacing = threading.Lock()  # never held for an import

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        torch = sys.modules.get("torch")
        if name.startswith(_NEED_ALL) and torch is not None:
            self.import_the_rest()
        elif name in _LATER and name not in self._left_out:
            found = str(getattr(torch, "__version__", "")).startswith(_VERSION)
            spec = PathFinder.find_spec(name, path) if found else None
            if spec is not None:
                self._left_out.add(name)
                spec.loader = self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        with suppress(ImportError, AttributeError):
            # what they import does this, too, after a tenth of a second; `torch.Generator` needs it
            kind = import_module("torch._opaque_base").OpaqueBaseMeta
            sys.modules["torch._C"]._set_generator_metaclass(kind)

    def import_the_rest(self) -> None:
        """Import what was left out, or wait for a thread that does; after an error, try again."""
        thread = threading.get_ident()
        if thread in self._at_work:
            return
        self._at_work.add(thread)
        try:
            with self._replacing:
                for name in _LATER:
                    if isinstance(sys.modules.get(name), _Later):
                        del sys.modules[name]
            for name in _LATER:
                import_module(name)
        finally:
            self._at_work.remove(thread)
        with suppress(ValueError):  # another thread was faster
            sys.meta_path.remove(self)


class _Later(ModuleType):
    """Stands for a module that is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # those are of the import system
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__["__loader__"].import_the_rest()
        return getattr(import_module(self.__name__), name)
