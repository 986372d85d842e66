"""Retriever `cosine`: scores tokens by similarity to the turn's mean key and mean value."""

from __future__ import annotations

from sirchat.memory.recall.base import SimilarityRetriever


class Cosine(SimilarityRetriever):
    """Scores tokens by cosine similarity to the turn's mean key and mean value.

    Retrieval-Augmented StreamingLLM, equation (2).
    """

    index_probes = 256
