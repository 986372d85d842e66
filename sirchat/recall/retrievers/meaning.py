"""Retriever `meaning`: finds passages by shared words and by meaning."""

from __future__ import annotations

from sirchat.recall.retrievers.base import PassageRetriever


class Meaning(PassageRetriever):
    """Finds passages by shared words and, if the model has an encoder, by meaning."""

    by_meaning = True
