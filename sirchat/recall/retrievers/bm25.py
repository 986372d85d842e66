"""Retriever `bm25`: scores whole turns by the words that they share with the new turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.recall.retrievers.base import WordRetriever, with_neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Bm25(WordRetriever):
    """Scores whole turns by the words that they share with the new turn.

    BM25 (`recall.word_index.WordIndex`), plus half of the scores of the turns beside it.
    """

    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        return with_neighbours(words)
