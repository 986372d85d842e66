"""Retriever `words`: scores whole turns by shared words, pairs of words, and similar words."""

from __future__ import annotations

from sirchat.recall.retrievers.base import WordRetriever


class Words(WordRetriever):
    """Scores whole turns by the new turn's words, pairs of them, and words of similar meaning.

    `recall.wide_index.WideIndex` computes the scores.
    """

    wide_words = True
