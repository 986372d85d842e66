"""The retrievers, which score evicted tokens; the best tokens are restored for one turn.

Each retriever is in a file of its own, named after the retriever. Other packages add retrievers
through the entry point group `sirchat.retrievers`. Neither listing names nor importing a retriever
imports torch, so that settings can be checked without torch.
"""

from __future__ import annotations

from sirchat.memory.recall.base import Retriever
from sirchat.memory.registry import Registry

BEST = "words"
"""The retriever that the setting `recall: on` uses.

With real questions, it restored the largest share of the tokens needed for the answers.
"""

_REGISTRY = Registry("retriever", __name__, "sirchat.retrievers")


def retriever_names() -> list[str]:
    """Names of all retrievers (scorers of evicted tokens), the built-in retrievers first.

    No retriever is imported.
    """
    return _REGISTRY.names()


def is_retriever(name: str) -> bool:
    """Whether there is a retriever (a scorer of evicted tokens) of this name."""
    return name in _REGISTRY


def retriever(name: str) -> Retriever:
    """Make the retriever called `name`, which scores evicted tokens.

    Raises SettingError if no retriever has this name.
    """
    found: Retriever = _REGISTRY.find(name, Retriever)()
    return found
