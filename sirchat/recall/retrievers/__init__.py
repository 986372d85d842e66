"""The retrievers, one file each: they score archived tokens for a turn."""

from __future__ import annotations

from functools import cache

from sirchat.memory.registry import RETRIEVERS
from sirchat.recall.retrievers.base import Retriever


@cache  # it has no state
def retriever(name: str) -> Retriever:
    """The retriever called `name`; raises SettingError for an unknown name."""
    made: Retriever = RETRIEVERS.find(name)()
    return made
