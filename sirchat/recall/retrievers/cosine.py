"""Retriever `cosine`: scores tokens by similarity to the turn's mean key and mean value."""

from __future__ import annotations

from sirchat.recall.retrievers.base import SimilarityRetriever


class Cosine(SimilarityRetriever):
    """Scores tokens by cosine similarity to the turn's mean key and mean value.

    Retrieval-Augmented StreamingLLM, equation (2).
    """
