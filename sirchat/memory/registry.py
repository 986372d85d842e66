"""Finds classes of one kind by name: eviction policies and retrievers.

Other packages add classes by a group of entry points. Listing the names imports no class, so
settings are checked without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from typing import Any

from sirchat.errors import SettingError, did_you_mean


class Registry:
    """Finds classes of one kind, such as eviction policies, by name.

    The module `base` of `package` has the base class. `files` has the module of each built-in class
    by its name; without it, the class `cosine-pairwise` is `CosinePairwise` in `cosine_pairwise`.
    Classes of other packages are entry points in `group`.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        files: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._kind, self._package, self._group = kind, package, group
        self._files, self.aliases = files, aliases or {}

    def names(self) -> list[str]:
        """All names without aliases, built-in classes first."""
        built_in = sorted(self._built_in())
        added = {entry.name for entry in importlib.metadata.entry_points(group=self._group)}
        return built_in + sorted(added - set(built_in))

    def __contains__(self, name: str) -> bool:
        # Entry points are read only if no built-in class has the name.
        return name in self._built_in() or name in self.names()

    def find(self, name: str, hint: str = "") -> type[Any]:
        """The class with this name or alias.

        Raises SettingError if there is none, with the most similar name, or else `hint`, as the
        hint.
        """
        name = self.aliases.get(name, name)
        if module := self._built_in().get(name):
            kind = "".join(part.capitalize() for part in name.split("-"))
            return self.load(f"{self._package}.{module}:{kind}")
        for entry in importlib.metadata.entry_points(group=self._group, name=name):
            return self.load(entry.value)
        names = self.names()
        raise SettingError(
            f"{self._kind} {name!r} is unknown; choose one of {', '.join(names)}",
            hint=did_you_mean(name, [*names, *self.aliases]) or hint,
        )

    def load(self, path: str) -> type[Any]:
        """Import the class `module:Class`; SettingError if it can't be, or is of another kind."""
        module, _, name = path.partition(":")
        base = getattr(importlib.import_module(f"{self._package}.base"), self._kind.capitalize())
        try:
            loaded = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(f"{self._kind} {path} cannot be imported: {error}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise SettingError(f"{path} is not a sirchat {self._kind}")
        return loaded

    def _built_in(self) -> Mapping[str, str]:
        """The module of each built-in class, by the class's name."""
        if self._files is not None:
            return self._files
        modules = pkgutil.iter_modules(importlib.import_module(self._package).__path__)
        names = {module.name for module in modules} - {"base"}
        return {name.replace("_", "-"): name for name in names}


# Named here, because settings are checked below the room `recall`.
RETRIEVERS = Registry("retriever", "sirchat.recall.retrievers", "sirchat.retrievers")
# What the setting `recall: on` uses: it restored most of the tokens that real questions need.
BEST_RETRIEVER = "meaning"
