"""The eviction policies; each is in a file of its own, named after the policy.

Other packages add policies through the entry point group `sirchat.policies`, and a user can name a
class by its path `package.module:Class`. Listing names imports no policy, and so no torch.

Using such a path runs a module's code, so only paths that the user typed are accepted.
`refuse_untrusted` refuses paths in files, because a file may come from somebody else.
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

ALIASES = {"stream": "sink", "attention": "h2o"}
"""Additional names of policies, each with the policy that it stands for."""

_REGISTRY = Registry("policy", __name__, "sirchat.policies", ALIASES)


def policy_names() -> list[str]:
    """Names of all policies, the built-in ones first; imports none of them."""
    return _REGISTRY.names()


def is_policy(name: str) -> bool:
    """Whether there is a policy of this name."""
    return name in _REGISTRY


def is_path(name: str) -> bool:
    """Whether `name` has the form `package.module:Class`."""
    module, colon, kind = name.partition(":")
    return bool(colon) and kind.isidentifier() and all(map(str.isidentifier, module.split(".")))


def policy_class(name: str) -> type[Policy]:
    """The policy class with this name, alias or path `module:Class`.

    Raises SettingError if there is none. A module in the current folder is found only if
    `import_typed` was called for it before.
    """
    from sirchat.memory.policies.base import Policy

    if is_path(name):
        return _REGISTRY.load(name, Policy)
    return _REGISTRY.find(name, Policy, hint="or package.module:Class")


def import_typed(name: str) -> None:
    """Import the module of a policy that the user typed as `module:Class`.

    The module may be in the current folder. Does nothing for a name without a colon, or if the
    import fails; `policy_class` then raises the error.
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
    """Raise SettingError if the policy `name` is a `module:Class` that is not in `trusted`.

    `source` is the file that names the policy.
    """
    if isinstance(name, str) and ":" in name and name not in trusted:
        shown = format_value(name)
        raise SettingError(
            f"{source}: policy {shown} would run a module's code, which a file may not request",
            hint=f"if you trust this module: --trust-policy {shown}",
        )
