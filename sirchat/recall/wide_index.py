"""An index of words, pairs of words and words of similar meaning, for the retriever `words`."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.recall.retrievers.base import with_neighbours
from sirchat.recall.terms import letter_groups, words_of
from sirchat.recall.word_index import Floats, TurnIndex
from sirchat.recall.word_vectors import WordVectors

_SENTENCE = re.compile(r"[^.!?？。！\n]+[.!?？。！]*")
_B = 0.75  # how far a turn's length counts
_POWER = 1.5  # of a term's rarity
_NEAR, _NEAREST = 0.25, 20  # least cosine of a similar word; number of similar words
_MEANING = 4  # weight of a word with its similar words; groups of letters and pairs have 1
_MOST = 50_000  # postings that a search looks at; the rarest terms come first

_Counts = dict[str, tuple[int, int]]  # by term: in statements, in questions


class WideIndex(TurnIndex):
    """Scores turns by shared groups of letters and pairs of words, and by words of similar meaning.

    The formula is BM25 (k1 = 1, b = 0.75), with these changes:

    - A term's rarity (inverse document frequency) is raised to the power of 1.5.
    - For each word of the query, the 20 words of the conversation with the nearest vectors count
      together as one term of weight 4; each is counted with its cosine as weight.
    - A document is a turn with the turns beside it. A word counts 1 in the turn's statements, 0.5
      in its questions, 0.5 and 1 in those of the turn before, and 0.5 in the turn after.
    - Each sentence of the query is scored alone, and half of the scores of the turns beside it is
      added to a turn's score. The result is the root of the sum of the squares over the sentences.
    """

    def __init__(self, vectors: WordVectors) -> None:
        super().__init__()
        self._vectors = vectors
        self._told, self._asked = array("f"), array("f")  # words of each turn
        self._terms: dict[str, _Postings] = {}  # groups of letters; pairs, with a space between
        self._words: dict[str, _Postings] = {}
        self._names: list[str] = []  # the keys of `_words`, in order
        self._of_names = np.zeros((0, vectors.dims), np.float32)  # vectors; some places are free
        self._near: dict[str, _Near] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        self._update(texts)
        total = np.zeros(len(self._texts), np.float32)
        sentences = [words for text in _SENTENCE.findall(wanted) if (words := words_of(text))]
        if not len(total) or not sentences:
            return total.astype(np.float64)
        lengths = _pooled(np.array(self._told), np.array(self._asked))
        norms = (1 - _B) + _B * lengths / max(float(lengths.mean()), 1e-9)
        most = self._longest_postings(sentences)
        for words in sentences:
            scores, sums = np.zeros(len(total), np.float32), _Sums(len(total))
            for term in dict.fromkeys(_terms(words)):
                postings = self._terms.get(term)
                if postings is not None and len(postings.turns) <= most:
                    _accumulate(scores, sums, [(postings, 1.0)], norms, 1)
            for near in self._similar(list(dict.fromkeys(words))):
                of_words = [(self._words[name], weight) for name, weight in near]
                of_words = [each for each in of_words if len(each[0].turns) <= most]
                if of_words:
                    _accumulate(scores, sums, of_words, norms, _MEANING)
            total += with_neighbours(scores.astype(np.float64)).astype(np.float32) ** 2
        return np.sqrt(total).astype(np.float64)

    def _longest_postings(self, sentences: Sequence[Sequence[str]]) -> int:
        """In how many turns a term may be so that a search reads at most `_MOST` postings."""
        terms = [self._terms.get(term) for words in sentences for term in _terms(words)]
        known = [*terms, *(self._words.get(word) for words in sentences for word in words)]
        total = 0
        for size in sorted(len(postings.turns) for postings in known if postings is not None):
            total += size
            if total > _MOST:
                return size - 1
        return len(self._texts)

    def _similar(self, words: Sequence[str]) -> list[list[tuple[str, float]]]:
        """For each word: the words of the chat with the nearest vectors, and the cosines."""
        new = [word for word in words if word not in self._near]
        for word, vector in zip(new, self._vectors.of(new) if new else (), strict=True):
            self._near[word] = _Near(vector, 0, {})
        for word in words:
            near = self._near[word]
            cosines = self._of_names[near.compared : len(self._names)] @ near.vector
            for at in np.flatnonzero(cosines >= _NEAR).tolist():
                near.cosines[near.compared + at] = float(cosines[at])
            best = sorted(near.cosines, key=near.cosines.__getitem__, reverse=True)[:_NEAREST]
            self._near[word] = _Near(
                near.vector, len(self._names), {at: near.cosines[at] for at in best}
            )
        return [
            [
                (self._names[at], 1.0 if self._names[at] == word else cosine)
                for at, cosine in self._near[word].cosines.items()
            ]
            for word in words
        ]

    def _turns_with(self, term: str) -> array[int]:
        return self._terms[term].turns if term in self._terms else array("i")

    def _add(self, at: int, text: str) -> None:
        terms, words = _counted(text)
        new = [word for word in words if word not in self._words]
        for index, counts in ((self._terms, terms), (self._words, words)):
            for term, (told, asked) in counts.items():
                postings = index.setdefault(term, _Postings(array("i"), array("f"), array("f")))
                postings.turns.append(at)
                postings.told.append(told)
                postings.asked.append(asked)
        self._told.append(sum(told for told, _ in words.values()))
        self._asked.append(sum(asked for _, asked in words.values()))
        if new:
            self._add_vectors(new)

    def _add_vectors(self, new: Sequence[str]) -> None:
        vectors, known = self._vectors.of(new), len(self._names)
        self._names += new
        if len(self._names) > len(self._of_names):
            size = max(len(self._names), 2 * known, 1024)
            grown = np.zeros((size, vectors.shape[1]), np.float32)
            grown[:known] = self._of_names[:known]
            self._of_names = grown
        self._of_names[known : len(self._names)] = vectors

    def _remove(self, text: str) -> None:
        for index, counts in zip((self._terms, self._words), _counted(text), strict=True):
            for term in counts:
                for column in index[term]:
                    column.pop()
                if not index[term].turns:
                    del index[term]
        self._told.pop()
        self._asked.pop()
        left = len(self._words)  # the removed words were the last that were added
        if left < len(self._names):
            del self._names[left:]
            self._near = {w: near for w, near in self._near.items() if near.compared <= left}


class _Postings(NamedTuple):
    turns: array[int]  # [k] that have the term, ascending
    told: array[float]  # how often each has it in statements
    asked: array[float]  # and in questions


class _Near(NamedTuple):
    """A word's vector, and its cosines to the nearest of `compared` words of the index."""

    vector: Floats
    compared: int
    cosines: dict[int, float]


class _Sums:
    """Counts how often turns have a term, with the shares for the turns before and after it."""

    def __init__(self, turns: int) -> None:
        self._counts = np.zeros(turns + 2, np.float32)  # one place more at each end
        self._order = np.zeros(turns + 2, np.int64)

    def of(self, words: Sequence[tuple[_Postings, float]]) -> tuple[NDArray[np.int64], Floats]:
        """The turns [k] with one of the `words` in or beside them, and their weighted counts."""
        at = np.concatenate([postings.turns for postings, _ in words]).astype(np.int64) + 1
        told = np.concatenate([np.array(each.told) * np.float32(share) for each, share in words])
        asked = np.concatenate(
            [np.array(each.asked) * np.float32(weight) for each, weight in words]
        )
        places = np.concatenate([at, at + 1, at - 1])
        np.add.at(self._counts, places, np.concatenate(_shares(told, asked)))
        order = np.arange(len(places))
        self._order[places] = order  # of equal places the last one is written
        places = places[self._order[places] == order]
        counts = self._counts[places]
        self._counts[places] = 0
        inside = (places > 0) & (places < len(self._counts) - 1)
        return places[inside] - 1, counts[inside]


def _accumulate(
    scores: Floats,
    sums: _Sums,
    words: Sequence[tuple[_Postings, float]],
    norms: Floats,
    weight: float,
) -> None:
    """Add what one term, made of weighted words, contributes to the scores [n] of all turns."""
    turns, counts = sums.of(words)
    having = float(np.minimum(counts, 1).sum(dtype=np.float64))
    rarity = math.log(1 + max(0.0, len(scores) - having + 0.5) / (having + 0.5)) ** _POWER
    scores[turns] += np.float32(weight * rarity) * (counts / (counts + norms[turns]))


def _pooled(told: Floats, asked: Floats) -> Floats:
    """The lengths [n] of the turns, in words, with the shares of the turns beside them."""
    pooled, after, before = _shares(told, asked)
    pooled[1:] += after[:-1]
    pooled[:-1] += before[1:]
    return pooled


def _shares(told: Floats, asked: Floats) -> tuple[Floats, Floats, Floats]:
    """What the counts [n] in each turn add to the turn itself, to the turn after, and before it."""
    half = np.float32(0.5)
    return told + half * asked, half * told + asked, half * (told + asked)


def _terms(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        yield from letter_groups(word)
    for pair in pairwise(words):
        yield " ".join(pair)


def _counted(text: str) -> tuple[_Counts, _Counts]:
    """How often a text has each term, and each word."""
    terms, words = (Counter[str](), Counter[str]()), (Counter[str](), Counter[str]())
    for sentence in _SENTENCE.findall(text):
        of_sentence, is_question = words_of(sentence), sentence.rstrip().endswith(("?", "？"))
        terms[is_question].update(_terms(of_sentence))
        words[is_question].update(of_sentence)
    return _paired(*terms), _paired(*words)


def _paired(told: Counter[str], asked: Counter[str]) -> _Counts:
    return {term: (told[term], asked[term]) for term in dict.fromkeys((*told, *asked))}
