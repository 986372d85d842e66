"""Finds classes of one kind by name: eviction policies and retrievers.

Each class is in its own file of one package, and the file has the class's name. Other packages add
classes through an entry point group. Listing the names imports no class.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from sirchat.errors import SettingError, nearest


class Registry:
    """The classes of one kind.

    Args:
        kind: what error messages call such a class, for example "policy".
        package: the package whose modules, except `base`, have the built-in classes. The file
            `cosine_pairwise.py` has the class `CosinePairwise`, found as `cosine-pairwise`.
        group: the entry point group of the classes that other packages add.
        aliases: other names of built-in classes.
    """

    def __init__(
        self, kind: str, package: str, group: str, aliases: Mapping[str, str] | None = None
    ) -> None:
        self._kind, self._package, self._group = kind, package, group
        self.aliases = aliases or {}

    def names(self) -> list[str]:
        """All names, the built-in ones first."""
        built_in = self._built_in()
        added = {entry.name for entry in importlib.metadata.entry_points(group=self._group)}
        return built_in + sorted(added - set(built_in))

    def __contains__(self, name: str) -> bool:
        """Whether a class has this name; entry points are read only if no built-in class has it."""
        return name in self._built_in() or name in self.names()

    def find(self, name: str, base: type, hint: str = "") -> type[Any]:
        """The class called `name`, a subclass of `base`.

        Raises SettingError if there is none; the error suggests the nearest name, or else `hint`.
        """
        name = self.aliases.get(name, name)
        if name in self._built_in():
            module = name.replace("-", "_")
            kind = "".join(part.capitalize() for part in name.split("-"))
            return self.load(f"{self._package}.{module}:{kind}", base)
        for entry in importlib.metadata.entry_points(group=self._group, name=name):
            return self.load(entry.value, base)
        names = self.names()
        raise SettingError(
            f"{self._kind} {name!r} is unknown; choose one of {', '.join(names)}",
            hint=nearest(name, [*names, *self.aliases]) or hint,
        )

    def load(self, path: str, base: type) -> type[Any]:
        """The class at `module:Class`; raises SettingError if it is no subclass of `base`."""
        module, _, name = path.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(f"{self._kind} {path} cannot be imported: {error}") from error
        if not (isinstance(found, type) and issubclass(found, base)):
            raise SettingError(f"{path} is not a sirchat {self._kind}")
        return found

    def _built_in(self) -> list[str]:
        path = sys.modules[self._package].__path__
        names = (module.name for module in pkgutil.iter_modules(path))
        return sorted(name.replace("_", "-") for name in names if name != "base")
