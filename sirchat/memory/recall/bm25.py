"""Retriever `bm25`: scores whole turns by the words that they share with the new turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.memory.recall.base import WordRetriever, with_neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Bm25(WordRetriever):
    """Scores whole turns by the words that they share with the new turn.

    A turn's word score is its BM25 score (`chat.word_index.WordIndex`). The turn's final score is
    its word score plus half of the word scores of the turns right before and after it.
    """

    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        return with_neighbours(words)
