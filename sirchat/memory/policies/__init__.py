"""The eviction policies: one file each, the file name is the policy's name.

Other packages add policies through the entry point group `sirchat.policies`, and anybody through a
path `package.module:Class`. Listing names imports no policy, and so no torch.

To use such a path is to run a module's code, so a path counts only where the user wrote it: files,
which may be somebody else's, are checked by `refuse_untrusted`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from sirchat.errors import SettingError, format_value, nearest

if TYPE_CHECKING:
    from sirchat.memory.policies.base import Policy

ALIASES = {"stream": "sink", "attention": "h2o"}
"""Other names of policies."""

_GROUP = "sirchat.policies"


def policy_names() -> list[str]:
    """Names of all policies, ours first, without importing them."""
    ours = _ours()
    theirs = {entry.name for entry in importlib.metadata.entry_points(group=_GROUP)}
    return ours + sorted(theirs - set(ours))


def is_policy(name: str) -> bool:
    """Whether there is a policy of this name; only for one that is not ours plugins are asked."""
    return name in _ours() or name in policy_names()


def is_path(name: str) -> bool:
    """Whether `name` has the form `package.module:Class`."""
    module, colon, kind = name.partition(":")
    return bool(colon) and kind.isidentifier() and all(map(str.isidentifier, module.split(".")))


def policy_class(name: str) -> type[Policy]:
    """The policy called `name`; raises SettingError when there is none.

    A module in the current folder is found only after `import_typed`.
    """
    name = ALIASES.get(name, name)
    if name in _ours():
        return _import(f"{__name__}.{name}", name.capitalize())
    if is_path(name):
        return _import(*name.split(":", 1))
    for entry in importlib.metadata.entry_points(group=_GROUP, name=name):
        return _import(*entry.value.split(":", 1))
    names = policy_names()
    raise SettingError(
        f"policy {name!r} is unknown; there are {', '.join(names)}",
        hint=nearest(name, [*names, *ALIASES]) or "or package.module:Class",
    )


def import_typed(name: str) -> None:
    """Import the module of a `module:Class` that the user typed; it may be in the current folder.

    Other names, and modules that can't be imported, are left to `policy_class`.
    """
    if not is_path(name):
        return
    sys.path.append("")  # the current folder, as for `python -m`
    try:
        with suppress(ImportError, ValueError):
            importlib.import_module(name.split(":", 1)[0])
    finally:
        sys.path.remove("")


def refuse_untrusted(name: object, source: str, trusted: Collection[str]) -> None:
    """Raise SettingError if a file, `source`, names a `module:Class` that is not `trusted`."""
    if isinstance(name, str) and ":" in name and name not in trusted:
        shown = format_value(name)
        raise SettingError(
            f"{source}: policy {shown} would run code of a module, which a file may not",
            hint=f"--trust-policy {shown} allows it, where Python finds the module",
        )


@cache
def _ours() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def _import(module_name: str, class_name: str) -> type[Policy]:
    from sirchat.memory.policies.base import Policy

    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        name = f"{module_name}:{class_name}"
        raise SettingError(f"policy {name} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise SettingError(f"{module_name}:{class_name} is not a sirchat policy")
    return found
