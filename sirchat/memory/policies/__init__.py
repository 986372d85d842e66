"""The eviction policies, in files by what they choose by.

Other packages add policies by the entry points `sirchat.policies`. A user may also name a class by
its path `package.module:Class`. Listing the names imports no policy, and so no torch.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from sirchat.errors import SettingError, format_value
from sirchat.memory.registry import Registry

if TYPE_CHECKING:
    from sirchat.memory.policies.base import Policy

# Additional names of eviction policies, each mapped to the policy's usual name.
ALIASES = {"stream": "sink", "attention": "h2o"}

# The file of each built-in policy.
_FILES = {
    "anchor": "anchor",
    "entropy": "by_surprisal",
    "full": "by_position",
    "h2o": "by_attention",
    "interval": "by_position",
    "keydiff": "by_key",
    "knorm": "by_key",
    "random": "by_chance",
    "reservoir": "by_chance",
    "salience": "by_surprisal",
    "sink": "by_position",
    "snapkv": "by_attention",
    "tova": "by_attention",
    "window": "by_position",
}
_REGISTRY = Registry("policy", __name__, "sirchat.policies", _FILES, ALIASES)


def policy_names() -> list[str]:
    """Names of all eviction policies, built-in ones first."""
    return _REGISTRY.names()


def is_policy(name: str) -> bool:
    """Whether an eviction policy has this name; aliases and paths do not count."""
    return name in _REGISTRY


def is_path(name: str) -> bool:
    """Whether `name` has the form `package.module:Class`."""
    module, colon, kind = name.partition(":")
    return bool(colon) and kind.isidentifier() and all(map(str.isidentifier, module.split(".")))


def policy_class(name: str) -> type[Policy]:
    """The class of the policy with this name, alias or path; raises SettingError if there is none.

    A module in the current folder is found only after `import_typed` of its path.
    """
    if is_path(name):
        return _REGISTRY.load(name)
    return _REGISTRY.find(name, hint="or package.module:Class")


def import_typed(name: str) -> None:
    """Import the module of a policy that the user typed as a path; ignore other names.

    The module may be in the current folder. `policy_class` raises the error of a failed import.
    """
    if not is_path(name):
        return
    sys.path.append("")  # the current folder, as for `python -m`
    try:
        with suppress(ImportError, ValueError):
            importlib.import_module(name.split(":", 1)[0])
    finally:
        sys.path.remove("")


def refuse_untrusted(name: object, source: str) -> None:
    """Raise SettingError if the file `source` names a policy of a module that is not imported.

    The module would run as code, and the file may come from somebody else.
    """
    if isinstance(name, str) and ":" in name and name.partition(":")[0] not in sys.modules:
        shown = format_value(name)
        raise SettingError(
            f"{source}: policy {shown} would run a module's code, which a file may not request",
            hint=f"if you trust this module: --trust-policy {shown}",
        )
