"""Finds classes of one kind by name: eviction policies and retrievers.

Each is one file of a package, which has the class's name; other packages add theirs through an
entry point group. Listing names imports none of them.
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
        kind: what errors call one of them, such as "policy".
        package: the package whose modules, but for `base`, are the built-in ones. The file
            `cosine_pairwise.py` has the class `CosinePairwise`, found as `cosine-pairwise`.
        group: the entry point group of those that other packages add.
        aliases: other names of built-in ones.
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
        """Whether there is one of this name; entry points are read only for other packages'."""
        return name in self._built_in() or name in self.names()

    def find(self, name: str, base: type, hint: str = "") -> type[Any]:
        """The class called `name`, a subclass of `base`.

        Raises SettingError when there is none, with the nearest name, or else `hint`.
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
        """The class at `module:Class`; raises SettingError where it isn't a subclass of `base`."""
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
