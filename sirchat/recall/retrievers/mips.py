"""Retriever `mips`: scores tokens by inner products with the turn's mean key and mean value."""

from __future__ import annotations

from sirchat.recall.retrievers.base import SimilarityRetriever


class Mips(SimilarityRetriever):
    """Scores tokens by inner products with the turn's mean key and mean value.

    Retrieval-Augmented StreamingLLM, equation (3).
    """

    cosine = False
