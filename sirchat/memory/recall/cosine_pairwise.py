"""Cosine similarity to the keys and values of the turn's most similar token."""

from __future__ import annotations

from sirchat.memory.recall.base import SimilarityRetriever


class CosinePairwise(SimilarityRetriever):
    """Cosine similarity to the keys and values of the turn's most similar token.

    Retrieval-Augmented StreamingLLM, equation (1); its text calls the mean of the cosines of keys
    and values harmonic, the equation's is arithmetic: ours follows the equation.
    """

    mean = False
    index_probes = 512
