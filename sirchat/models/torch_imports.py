"""Speeds up importing torch: loads its largest library in a thread, and some parts on demand."""

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
_DEFERRED_MODULES = ("torch._meta_registrations", "torch.export")
_TESTED_VERSION = "2.13."  # of torch, for which that was tried; another is imported as a whole
# What may need them without naming them. They import none of these, so no threads wait in a circle.
_NEED_WHOLE_TORCH = (
    "transformers",
    "accelerate",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot",
    "torch.export.",
)


def preload_torch() -> None:
    """On Linux, load torch's largest library by `dlopen`, which does not hold Python's lock (GIL).

    An import would hold the GIL for some tenths of a second, in which the prompt could echo no key.
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
    """Let `import torch` leave out some parts; they are imported when they may be used."""
    is_there = any(isinstance(finder, _DeferringFinder) for finder in sys.meta_path)
    if "torch" not in sys.modules and not is_there:
        sys.meta_path.insert(0, _DeferringFinder())


class _DeferringFinder(MetaPathFinder, Loader):
    """Imports a stand-in in place of each of `_DEFERRED_MODULES`, and the module on demand."""

    def __init__(self) -> None:
        self._deferred = set[str]()
        self._importing_threads = set[int]()  # identifiers of threads
        self._replace_lock = threading.Lock()  # never held for an import

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        torch = sys.modules.get("torch")
        if name.startswith(_NEED_WHOLE_TORCH) and torch is not None:
            self.import_deferred()
        elif name in _DEFERRED_MODULES and name not in self._deferred:
            found = str(getattr(torch, "__version__", "")).startswith(_TESTED_VERSION)
            spec = PathFinder.find_spec(name, path) if found else None
            if spec is not None:
                self._deferred.add(name)
                spec.loader = self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        with suppress(ImportError, AttributeError):
            # what they import does this, too, after a tenth of a second; `torch.Generator` needs it
            kind = import_module("torch._opaque_base").OpaqueBaseMeta
            sys.modules["torch._C"]._set_generator_metaclass(kind)

    def import_deferred(self) -> None:
        """Import the deferred modules, or wait for a thread that does; repeat after an error."""
        thread = threading.get_ident()
        if thread in self._importing_threads:
            return
        self._importing_threads.add(thread)
        try:
            with self._replace_lock:
                for name in _DEFERRED_MODULES:
                    if isinstance(sys.modules.get(name), _DeferredModule):
                        del sys.modules[name]
            for name in _DEFERRED_MODULES:
                import_module(name)
        finally:
            self._importing_threads.remove(thread)
        with suppress(ValueError):  # another thread was faster
            sys.meta_path.remove(self)


class _DeferredModule(ModuleType):
    """A stand-in for a module that is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # those are of the import system
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__["__loader__"].import_deferred()
        return getattr(import_module(self.__name__), name)
