"""An index of the words in a conversation: BM25 says how well earlier turns fit a new turn."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.recall.retrievers.base import with_neighbours

# English words that tell little by themselves, in lower case.
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about after all also am an and any are as at be been but by can could did do does for "
        "from get go had has have he her here hers him his how i if in into is it its just let "
        "like me more my no not now of off on one or our out over please she should so some tell "
        "than that the their them then there these they this those to too up us very was we were "
        "what when where which who why will with would yes you your",
    )
)

_SENTENCE = re.compile(r"[^.!?？。！\n]+[.!?？。！]*")
_WORD = re.compile(r"\w+")
_LETTERS = 4
_DENSE = "\u2e80"  # Chinese, Japanese and Korean begin here; a term has two characters
_K1, _B = 1.5, 0.75
_NAMED = 3  # most words that `shared_words` returns for a turn

Floats = NDArray[np.float32]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with the marks at its end."""
    return _SENTENCE.findall(text)


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.casefold())


def terms_of(text: str) -> list[str]:
    """The terms of all words of a text, in order."""
    return [term for word in words_of(text) for term in letter_groups(word)]


def letter_groups(word: str) -> list[str]:
    """A word's groups of four neighbouring letters, of which its start and its end count as one.

    A shorter word is one term. In Chinese, Japanese and Korean, a group has two characters.
    """
    marked = f"_{word}_"
    size = 2 if max(word) >= _DENSE else _LETTERS
    return [marked[at : at + size] for at in range(max(1, len(marked) - size + 1))]


class Postings(NamedTuple):
    """The k turns that have a term, ascending, and its counts in statements and in questions."""

    turns: array[int]
    told: array[float]
    asked: array[float]


class TurnIndex(ABC):
    """Scores the turns of a conversation by the words that they share with a new turn."""

    _counted = ""  # terms that begin so make up the length of a turn

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._postings: dict[str, Postings] = {}
        self._told, self._asked = array("f"), array("f")  # length of each turn's statements, ...

    @abstractmethod
    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        """How well each turn, with its text in `texts` [n], fits `wanted`; 0 if no word does.

        Words of the turns beside a turn count, too; words that few turns have count more.
        """

    @abstractmethod
    def _terms(self, words: Sequence[str]) -> Iterable[str]:
        """The terms of a sentence."""

    def shared_words(self, turns: Sequence[int], wanted: str) -> dict[int, tuple[str, ...]]:
        """For each turn, up to three words of `wanted` that it has in some form, the rarest first.

        Only the rarest may be one that a fifth of all turns have. If a turn has none, those of the
        turns beside it count.
        """
        terms_by_word = {word: terms_of(word) for word in re.findall(r"\w+", wanted)}
        near = np.unique([turn + step for turn in turns for step in (-1, 0, 1)])
        terms: dict[int, set[str]] = {turn: set() for turn in near.tolist()}
        counts = dict[str, int]()  # of turns, for each term that any of them has
        for term in dict.fromkeys(term for of_word in terms_by_word.values() for term in of_word):
            if term in self._postings:
                having = np.frombuffer(self._postings[term].turns, np.int32)  # no copy
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
        """Remove the turns from the first changed one on, and add those that now stand there."""
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

    def _add(self, at: int, text: str) -> list[str]:
        """Add turn number `at` at the end; returns the terms that are new."""
        told, asked = Counter[str](), Counter[str]()
        for sentence in sentences_of(text):
            is_question = sentence.rstrip().endswith(("?", "？"))
            (asked if is_question else told).update(self._terms(words_of(sentence)))
        new = list[str]()
        for term in dict.fromkeys((*told, *asked)):
            if term not in self._postings:
                self._postings[term] = Postings(array("i"), array("f"), array("f"))
                new.append(term)
            postings = self._postings[term]
            postings.turns.append(at)
            postings.told.append(told[term])
            postings.asked.append(asked[term])
        for lengths, counts in ((self._told, told), (self._asked, asked)):
            lengths.append(sum(n for term, n in counts.items() if term.startswith(self._counted)))
        return new

    def _remove(self, text: str) -> None:
        """Remove the last turn, which has this text."""
        for term in {term for each in sentences_of(text) for term in self._terms(words_of(each))}:
            for column in self._postings[term]:
                column.pop()
            if not self._postings[term].turns:
                del self._postings[term]
        self._told.pop()
        self._asked.pop()


class WordIndex(TurnIndex):
    """Scores turns by BM25 for the words of a new turn, the query.

    Lucene's variant (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019), as the
    library bm25s has it. Terms are groups of four letters; a document is a turn with those beside
    it, and gets half of their scores, too.
    """

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        self._update(texts)
        terms = [term for term in terms_of(wanted) if term in self._postings]
        scores = np.zeros(len(self._texts), np.float32)
        if terms:
            lengths = with_neighbours(np.array(self._told, np.float64) + np.array(self._asked), 1)
            norms = _K1 * ((1 - _B) + _B * lengths / lengths.mean())
            of_term = {term: self._scores_of(term, norms) for term in dict.fromkeys(terms)}
            for term in terms:
                scores += of_term[term]
        return with_neighbours(scores.astype(np.float64))

    def _terms(self, words: Sequence[str]) -> Iterable[str]:
        return (term for word in words for term in letter_groups(word))

    def _scores_of(self, term: str, norms: NDArray[np.float64]) -> Floats:
        turns, told, asked = map(np.array, self._postings[term])
        counts = np.zeros(len(norms), np.float32)
        counts[turns] = told + asked
        counts = with_neighbours(counts, 1)
        having = int(np.count_nonzero(counts))
        rarity = np.float32(math.log(1 + (len(norms) - having + 0.5) / (having + 0.5)))
        return (rarity * (counts / (norms + counts))).astype(np.float32)
