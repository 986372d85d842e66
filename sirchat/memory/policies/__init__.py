"""The eviction policies; each is in a file of its own, named after the policy.

`base` has their base classes, `scores` what several scores share, `check` tests their contract.

Other packages add policies through the entry point group `sirchat.policies`, and a user can name a
class by its path `package.module:Class`. Listing the names imports no policy and therefore no
torch.

Using a class by its path runs the code of the module, so only paths that the user typed are
accepted. `refuse_untrusted` refuses paths in files, because a file may come from somebody else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from sirchat.errors import SettingError, format_value
from sirchat.memory.registry import Registry

if TYPE_CHECKING:
    from sirchat.memory.policies.base import Policy

# Additional names of eviction policies, each mapped to the policy's usual name.
ALIASES = {"stream": "sink", "attention": "h2o"}

_REGISTRY = Registry("policy", __name__, "sirchat.policies", ALIASES, ("base", "check", "scores"))


def policy_names() -> list[str]:
    """Names of all eviction policies, the built-in policies first; imports no policy."""
    return _REGISTRY.names()


def is_policy(name: str) -> bool:
    """Whether there is an eviction policy of this name; aliases and paths do not count."""
    return name in _REGISTRY


def is_path(name: str) -> bool:
    """Whether `name` has the form `package.module:Class`, the path of a policy's class."""
    module, colon, kind = name.partition(":")
    return bool(colon) and kind.isidentifier() and all(map(str.isidentifier, module.split(".")))


def policy_class(name: str) -> type[Policy]:
    """The eviction policy's class with this name, alias or path `module:Class`.

    Raises SettingError if there is no policy of this name. A module in the current folder is found
    only if `import_typed` was called before with its path.
    """
    if is_path(name):
        return _REGISTRY.load(name)
    return _REGISTRY.find(name, hint="or package.module:Class")


def import_typed(name: str) -> None:
    """Import the module of an eviction policy that the user typed as `module:Class`.

    The module may be in the current folder. Does nothing if `name` does not have this form. If the
    import fails, no error is raised here; `policy_class` raises it later.
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
    """Raise SettingError if a file names a policy by a path `module:Class` that is not trusted.

    `name` is the policy's name in the file `source`; `trusted` are the paths that are allowed.
    """
    if isinstance(name, str) and ":" in name and name not in trusted:
        shown = format_value(name)
        raise SettingError(
            f"{source}: policy {shown} would run a module's code, which a file may not request",
            hint=f"if you trust this module: --trust-policy {shown}",
        )
