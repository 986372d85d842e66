"""Retriever `words`: scores whole turns by shared words, pairs of words, and similar words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.memory.recall.base import WordRetriever

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Words(WordRetriever):
    """Scores whole turns by the new turn's words, pairs of them, and words of similar meaning.

    `chat.word_index.WideIndex` computes the score of an earlier turn; the turns right before and
    after that turn contribute to its score. Words of similar meaning are found by the model's input
    embeddings.
    """

    wide_words = True

    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        return words
