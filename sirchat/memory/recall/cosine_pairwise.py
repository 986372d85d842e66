"""Cosine similarity to the keys and values of the turn's most similar token."""

from __future__ import annotations

from sirchat.memory.recall.base import SimilarityRetriever


class CosinePairwise(SimilarityRetriever):
    """Cosine similarity to the keys and values of the turn's most similar token.

    Retrieval-Augmented StreamingLLM, equation (1). The text calls the mean of the two cosines, of
    keys and of values, harmonic; in the equation it is arithmetic, and this follows the equation.
    """

    mean = False
    index_probes = 512
