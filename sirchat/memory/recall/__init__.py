"""The retrievers, which score evicted tokens: the best are restored to the cache for one turn.

Each retriever is in a file of its own, named after it.

Other packages add retrievers through the entry point group `sirchat.retrievers`. Neither listing
names nor importing a retriever imports torch, so that settings can be checked without it.
"""

from __future__ import annotations

from sirchat.memory.recall.base import Retriever
from sirchat.memory.registry import Registry

BEST = "words"
"""The retriever that `recall: on` stands for: it restored most of what real questions needed."""

_REGISTRY = Registry("retriever", __name__, "sirchat.retrievers")


def retriever_names() -> list[str]:
    """Names of all retrievers, the built-in ones first; imports none of them."""
    return _REGISTRY.names()


def is_retriever(name: str) -> bool:
    """Whether there is a retriever of this name."""
    return name in _REGISTRY


def retriever(name: str) -> Retriever:
    """The retriever called `name`; raises SettingError if there is none."""
    found: Retriever = _REGISTRY.find(name, Retriever)()
    return found
