"""Retriever `bm25`: scores whole turns by the words that they share with the new turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.memory.recall.base import WordRetriever, with_neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Bm25(WordRetriever):
    """Scores whole turns by the words that they share with the new turn.

    A turn's score is its word score (`chat.word_index.WordIndex`) plus half of the word scores of
    the turns before and after it.
    """

    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        return with_neighbours(words)
