"""Retriever `cosine-pairwise`: scores tokens by similarity to the turn's most similar token."""

from __future__ import annotations

from sirchat.memory.recall.base import SimilarityRetriever


class CosinePairwise(SimilarityRetriever):
    """Scores tokens by cosine similarity to the turn's most similar token, by keys and values.

    Retrieval-Augmented StreamingLLM, equation (1). The similarity is the arithmetic mean of the
    cosine of keys and the cosine of values, as in the paper's equation; the paper's text calls this
    mean harmonic.
    """

    mean = False
    index_probes = 512
