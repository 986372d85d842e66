"""Retriever `bm25`: scores whole turns by the words that they share with the new turn."""

from __future__ import annotations

from sirchat.recall.retrievers.base import WordRetriever


class Bm25(WordRetriever):
    """Scores whole turns by the words that they share with the new turn.

    `recall.word_index.WordIndex` computes the scores.
    """
