"""BM25: which turns share words with the one that arrives. Text becomes one number per turn here.

What is scored is a turn together with the one before and the one after it: an answer rarely repeats
the words of its question. Words are compared by their groups of four letters, so that `adopted`
finds `adoption` in any language, without a list of endings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"\w+")
_LETTERS = 4
_DENSE = "\u2e80"  # from here on: Chinese, Japanese and Korean, where two characters say as much


class TurnWords:
    """BM25 over the turns of a conversation, which are split into words once.

    Parameters are the library's: Lucene's variant, k1 1.5, b 0.75 (Robertson and Zaragoza 2009,
    https://doi.org/10.1561/1500000019; Lù 2024, https://arxiv.org/abs/2407.03618).
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._terms: list[list[int]] = []  # of each text, as numbers
        self._numbers: dict[str, int] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        """A score [n] for each turn by its text; 0 where no word of `wanted` is near.

        The rarity of a word is counted in these texts.
        """
        import bm25s  # takes 0.1 s

        self._read(list(texts))
        terms = [self._numbers[term] for term in terms_of(wanted) if term in self._numbers]
        if not terms:
            return np.zeros(len(self._terms))
        passages = [
            [term for near in self._terms[max(0, at - 1) : at + 2] for term in near]
            for at in range(len(self._terms))
        ]
        index = bm25s.BM25()
        index.index((passages, self._numbers), show_progress=False, create_empty_token=False)
        scores: NDArray[np.float64] = index.get_scores_from_ids(terms).astype(np.float64)
        return scores

    def _read(self, texts: list[str]) -> None:
        """Split what is new; all, if a text that was read has changed or is gone."""
        if self._texts != texts[: len(self._texts)]:
            self._texts, self._terms, self._numbers = [], [], {}
        for text in texts[len(self._texts) :]:
            known = self._numbers
            self._terms.append([known.setdefault(term, len(known)) for term in terms_of(text)])
        self._texts = texts


def terms_of(text: str) -> list[str]:
    """The terms of a text: the groups of four letters in each word, its ends counted as letters.

    A shorter word is a term of its own; Chinese, Japanese and Korean give pairs.
    """
    terms = []
    for word in _WORD.findall(text.casefold()):
        marked = f"_{word}_"
        size = 2 if max(word) >= _DENSE else _LETTERS
        terms += [marked[at : at + size] for at in range(max(1, len(marked) - size + 1))]
    return terms
