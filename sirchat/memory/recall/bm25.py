"""Whole turns, by the words that they have in common with the new turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.memory.recall.base import WordRetriever, with_neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Bm25(WordRetriever):
    """Whole turns, by the words that they have in common with the new turn.

    A turn's score is its score by words (`chat.recall.WordIndex`) plus a part of its neighbours'.
    """

    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        return with_neighbours(words)
