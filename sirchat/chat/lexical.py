"""BM25: which turns share words with the one that arrives. Text becomes one number per turn here.

What is scored is a turn together with the one before and the one after it: an answer rarely repeats
the words of its question. Words are compared by their groups of four letters, so that `adopted`
finds `adoption` in any language, without a list of endings.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_K1, _B = 1.5, 0.75
_Number = TypeVar("_Number", bound=np.floating)
_WORD = re.compile(r"\w+")
_LETTERS = 4
_DENSE = "\u2e80"  # from here on: Chinese, Japanese and Korean, where two characters say as much


class TurnWords:
    """BM25 over the turns of a conversation, which are split into words once.

    Lucene's variant, k1 1.5, b 0.75 (Robertson and Zaragoza 2009,
    https://doi.org/10.1561/1500000019), computed as the library bm25s does (Lù 2024,
    https://arxiv.org/abs/2407.03618), but for the words that are asked for alone.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lengths: list[int] = []  # of each text, in terms
        self._counts: dict[str, dict[int, int]] = {}  # of each term, by text

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        """A score [n] for each turn by its text; 0 where no word of `wanted` is near.

        The rarity of a word is counted in these texts.
        """
        self._read(list(texts))
        terms = [term for term in terms_of(wanted) if term in self._counts]
        scores = np.zeros(len(self._texts), np.float32)
        if not terms:
            return scores.astype(np.float64)
        lengths = _with_neighbours(np.array(self._lengths, np.float64))
        norms = _K1 * ((1 - _B) + _B * lengths / lengths.mean())
        of_term = {term: self._scores_of(term, norms) for term in dict.fromkeys(terms)}
        for term in terms:
            scores += of_term[term]
        return scores.astype(np.float64)

    def _scores_of(self, term: str, norms: NDArray[np.float64]) -> NDArray[np.float32]:
        """What one term adds to the score of each turn, [n]."""
        found = self._counts[term]
        counts = np.zeros(len(norms), np.float32)
        counts[list(found)] = list(found.values())
        counts = _with_neighbours(counts)
        having = int(np.count_nonzero(counts))
        rarity = np.float32(math.log(1 + (len(norms) - having + 0.5) / (having + 0.5)))
        return (rarity * (counts / (norms + counts))).astype(np.float32)

    def _read(self, texts: list[str]) -> None:
        """Split what is new; what has changed or is gone is taken out first."""
        same = 0
        for one, other in zip(self._texts, texts, strict=False):
            if one != other:
                break
            same += 1
        for at in reversed(range(same, len(self._texts))):
            for term in set(terms_of(self._texts[at])):
                del self._counts[term][at]
                if not self._counts[term]:
                    del self._counts[term]
        del self._lengths[same:]
        for at, text in enumerate(texts[same:], same):
            terms = terms_of(text)
            self._lengths.append(len(terms))
            for term, count in Counter(terms).items():
                self._counts.setdefault(term, {})[at] = count
        self._texts = texts


def _with_neighbours(numbers: NDArray[_Number]) -> NDArray[_Number]:
    """Each number, plus the one before it and the one after it."""
    total = numbers.copy()
    total[1:] += numbers[:-1]
    total[:-1] += numbers[1:]
    return total


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
