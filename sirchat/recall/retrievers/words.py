"""Retriever `words`: scores whole turns by shared words, pairs of words, and similar words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.recall.retrievers.base import WordRetriever

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Words(WordRetriever):
    """Scores whole turns by the new turn's words, pairs of them, and words of similar meaning.

    `recall.wide_index.WideIndex` computes the scores, in which the turns beside a turn count, too.
    """

    wide_words = True

    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        return words
