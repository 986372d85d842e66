"""An index of the words in a conversation: BM25 says how well earlier turns fit a new turn."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sirchat.recall.terms import terms_of

Floats = NDArray[np.float32]

_Number = TypeVar("_Number", bound=np.floating)
_K1, _B = 1.5, 0.75
_NAMED = 3  # most words that `shared` returns for a turn


class TurnIndex(ABC):
    """Scores the turns of a conversation by the words that they share with a new turn."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @abstractmethod
    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        """How well each turn, with its text in `texts` [n], fits `wanted`; 0 if no word does.

        Words of the turns beside a turn count, too; words that few turns have count more.
        """

    @abstractmethod
    def _add(self, at: int, text: str) -> None:
        """Add turn number `at` at the end."""

    @abstractmethod
    def _remove(self, text: str) -> None:
        """Remove the last turn, which has this text."""

    @abstractmethod
    def _turns_with(self, term: str) -> array[int]:
        """The numbers of the turns that contain a term, ascending, as 32-bit integers."""

    def shared(self, turns: Sequence[int], wanted: str) -> dict[int, tuple[str, ...]]:
        """For each turn, up to three words of `wanted` that it has in some form, the rarest first.

        Only the rarest may be one that a fifth of all turns have. If a turn has none, those of the
        turns beside it count.
        """
        terms_by_word = {word: terms_of(word) for word in re.findall(r"\w+", wanted)}
        near = np.unique([turn + step for turn in turns for step in (-1, 0, 1)])
        terms: dict[int, set[str]] = {turn: set() for turn in near.tolist()}
        counts = dict[str, int]()  # of turns, for each term that any of them has
        for term in dict.fromkeys(term for of_word in terms_by_word.values() for term in of_word):
            having = np.frombuffer(self._turns_with(term), np.int32)  # no copy
            if len(having):
                counts[term] = len(having)
                at = np.searchsorted(having, near.astype(np.int32))
                for turn in near[having.take(at, mode="clip") == near].tolist():
                    terms[turn].add(term)
        shared = dict[int, tuple[str, ...]]()
        for turn in turns:
            beside = terms[turn - 1] | terms[turn] | terms[turn + 1]
            shared[turn] = self._rarest(terms_by_word, terms[turn], counts) or self._rarest(
                terms_by_word, beside, counts
            )
        return shared

    def _rarest(
        self, terms_by_word: Mapping[str, list[str]], terms: Set[str], counts: Mapping[str, int]
    ) -> tuple[str, ...]:
        rarity = dict[str, int]()  # of the words with more than half of their terms in `terms`
        for word, of_word in terms_by_word.items():
            common = [counts[term] for term in of_word if term in terms]
            if 2 * len(common) > len(of_word):
                rarity[word] = min(common)
        if not rarity:
            return ()
        rarest, *others = sorted(rarity, key=lambda word: (rarity[word], -len(word)))
        others = [word for word in others if 5 * rarity[word] < len(self._texts)]
        return (rarest, *others[: _NAMED - 1])

    def _update(self, texts: Sequence[str]) -> None:
        """Remove the turns whose text changed since the last search, and add the new ones."""
        known = self._texts
        same = max(0, min(len(known), len(texts)) - 1)  # mostly, only the last text has changed
        if known[:same] != texts[:same]:
            pairs = enumerate(zip(known, texts, strict=False))
            same = next((at for at, (before, now) in pairs if before != now), same)
        while len(known) > same:
            self._remove(known.pop())
        for at, text in enumerate(texts[same:], same):
            self._add(at, text)
            known.append(text)


class WordIndex(TurnIndex):
    """Scores turns by BM25 for the words of a new turn, the query.

    Lucene's variant (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019), as the
    library bm25s has it. Terms are groups of four letters; a document is a turn with those beside
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lengths = array("d")  # of each text, in terms
        self._postings: dict[str, _Postings] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        self._update(texts)
        terms = [term for term in terms_of(wanted) if term in self._postings]
        scores = np.zeros(len(self._texts), np.float32)
        if not terms:
            return scores.astype(np.float64)
        lengths = _and_beside(np.array(self._lengths))
        norms = _K1 * ((1 - _B) + _B * lengths / lengths.mean())
        of_term = {term: self._scores_of(term, norms) for term in dict.fromkeys(terms)}
        for term in terms:
            scores += of_term[term]
        return scores.astype(np.float64)

    def _scores_of(self, term: str, norms: NDArray[np.float64]) -> Floats:
        postings = self._postings[term]
        counts = np.zeros(len(norms), np.float32)
        counts[np.array(postings.turns)] = np.array(postings.counts)
        counts = _and_beside(counts)
        having = int(np.count_nonzero(counts))
        rarity = np.float32(math.log(1 + (len(norms) - having + 0.5) / (having + 0.5)))
        return (rarity * (counts / (norms + counts))).astype(np.float32)

    def _turns_with(self, term: str) -> array[int]:
        return self._postings[term].turns if term in self._postings else array("i")

    def _add(self, at: int, text: str) -> None:
        terms = terms_of(text)
        self._lengths.append(len(terms))
        for term, count in Counter(terms).items():
            postings = self._postings.setdefault(term, _Postings(array("i"), array("f")))
            postings.turns.append(at)
            postings.counts.append(count)

    def _remove(self, text: str) -> None:
        self._lengths.pop()
        for term in set(terms_of(text)):
            postings = self._postings[term]
            postings.turns.pop()
            postings.counts.pop()
            if not postings.turns:
                del self._postings[term]


class _Postings(NamedTuple):
    turns: array[int]  # [k] that have the term, ascending
    counts: array[float]  # of the term in each


def _and_beside(numbers: NDArray[_Number]) -> NDArray[_Number]:
    """The sum of each number and those right before and after it."""
    total = numbers.copy()
    total[1:] += numbers[:-1]
    total[:-1] += numbers[1:]
    return total
