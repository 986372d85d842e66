"""Retriever `words`: finds passages by the words that they share with the new turn."""

from __future__ import annotations

from sirchat.recall.retrievers.base import PassageRetriever


class Words(PassageRetriever):
    """Finds passages by the words that they share with the new turn."""
