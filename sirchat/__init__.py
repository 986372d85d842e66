"""sirchat: endless chat with local language models, under a KV-cache budget that you choose.

For use from Python, this package has `load_model`, `Profile` and `Session`; chat/README.md has an
example. They are imported when they are first used, because importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sirchat.version import __version__

if TYPE_CHECKING:
    from sirchat.chat.session import Session
    from sirchat.config.profile import Profile
    from sirchat.models.load import load_model
    from sirchat.models.model import LoadedModel

__all__ = ("LoadedModel", "Profile", "Session", "__version__", "load_model")

_MODULES = {
    "LoadedModel": "sirchat.models.model",
    "Profile": "sirchat.config.profile",
    "Session": "sirchat.chat.session",
    "load_model": "sirchat.models.load",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sirchat' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
