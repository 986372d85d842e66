"""A registry finds a class by its name. There is one for eviction policies, one for retrievers.

Each built-in class is in a file of its own, named after the class. Other packages add classes
through a group of entry points. Listing the names imports no class.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Collection, Mapping
from typing import Any

from sirchat.errors import SettingError, nearest


class Registry:
    """Finds classes of one kind, such as eviction policies, by name.

    Args:
        kind: the word for a class of this kind in error messages, for example "policy".
        package: the package with the built-in classes, one in each module that is not in
            `others`. The file `cosine_pairwise.py` has the class `CosinePairwise`, named
            `cosine-pairwise`.
        group: the group of entry points by which other packages add classes.
        aliases: additional names of built-in classes.
        others: modules of the package that hold no class to be found.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        aliases: Mapping[str, str] | None = None,
        others: Collection[str] = ("base",),
    ) -> None:
        self._kind, self._package, self._group = kind, package, group
        self._others = others
        self.aliases = aliases or {}

    def names(self) -> list[str]:
        """All names of classes without aliases; the names of built-in classes come first."""
        built_in = self._built_in()
        added = {entry.name for entry in importlib.metadata.entry_points(group=self._group)}
        return built_in + sorted(added - set(built_in))

    def __contains__(self, name: str) -> bool:
        """Whether a class of this registry has the name `name`; aliases don't count.

        Entry points are read only if no built-in class has the name.
        """
        return name in self._built_in() or name in self.names()

    def find(self, name: str, base: type, hint: str = "") -> type[Any]:
        """The class with this name or alias; it is a subclass of `base`.

        Raises SettingError if no class has the name. The error's hint is the most similar name, or
        the text `hint` if no name is similar.
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
        """Import the class with the path `module:Class`.

        Raises SettingError if that fails, or if the class is no subclass of `base`.
        """
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
        return sorted(name.replace("_", "-") for name in names if name not in self._others)
