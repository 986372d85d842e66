"""Retriever `cosine-pairwise`: scores tokens by similarity to the turn's most similar token."""

from __future__ import annotations

from sirchat.recall.retrievers.base import SimilarityRetriever


class CosinePairwise(SimilarityRetriever):
    """Scores tokens by cosine similarity to the turn's most similar token, by keys and values.

    Retrieval-Augmented StreamingLLM, equation (1): the arithmetic mean of the cosines of keys and
    of values, which the paper's text calls harmonic.
    """

    mean = False
