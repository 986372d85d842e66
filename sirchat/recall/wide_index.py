"""An index of words, pairs of words and words of similar meaning, for the retriever `words`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.recall.retrievers.base import with_neighbours
from sirchat.recall.word_index import (
    Floats,
    Postings,
    TurnIndex,
    letter_groups,
    sentences_of,
    words_of,
)
from sirchat.recall.word_vectors import WordVectors

_B = 0.75  # how far a turn's length counts
_POWER = 1.5  # of a term's rarity
_NEAR, _NEAREST = 0.25, 20  # least cosine of a similar word; number of similar words
_MEANING = 4  # weight of a word with its similar words; groups of letters and pairs have 1
_MOST = 50_000  # postings that a search looks at; the rarest terms come first
_WORD = " "  # a word's term begins so; the others are groups of letters, and pairs of words


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

    _counted = _WORD

    def __init__(self, vectors: WordVectors) -> None:
        super().__init__()
        self._vectors = vectors
        self._words: list[str] = []  # all words of the chat, in order of their first turn
        self._of_words = np.zeros((0, vectors.dims), np.float32)  # vectors; some places are free
        self._near: dict[str, _Near] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        self._update(texts)
        total = np.zeros(len(self._texts), np.float32)
        sentences = [words for text in sentences_of(wanted) if (words := words_of(text))]
        if not len(total) or not sentences:
            return total.astype(np.float64)
        lengths = _pooled(np.array(self._told), np.array(self._asked))
        norms = (1 - _B) + _B * lengths / max(float(lengths.mean()), 1e-9)
        most = self._longest_postings(sentences)
        for words in sentences:
            scores, sums = np.zeros(len(total), np.float32), _Sums(len(total))
            terms = [[(term, 1.0)] for term in dict.fromkeys(_groups_and_pairs(words))]
            for weight, weighted_terms in ((1, terms), (_MEANING, self._similar(words))):
                for alike in weighted_terms:
                    known = [(self._postings.get(term), share) for term, share in alike]
                    postings = [(p, share) for p, share in known if p and len(p.turns) <= most]
                    if postings:
                        _accumulate(scores, sums, postings, norms, weight)
            total += with_neighbours(scores.astype(np.float64)).astype(np.float32) ** 2
        return np.sqrt(total).astype(np.float64)

    def _longest_postings(self, sentences: Sequence[Sequence[str]]) -> int:
        """In how many turns a term may be so that a search reads at most `_MOST` postings."""
        terms = (term for words in sentences for term in self._terms(words))
        known = (self._postings.get(term) for term in terms)
        total = 0
        for size in sorted(len(postings.turns) for postings in known if postings is not None):
            total += size
            if total > _MOST:
                return size - 1
        return len(self._texts)

    def _similar(self, words: Sequence[str]) -> list[list[tuple[str, float]]]:
        """For each word: the words of the chat with the nearest vectors, as terms; the cosines."""
        words = list(dict.fromkeys(words))
        new = [word for word in words if word not in self._near]
        for word, vector in zip(new, self._vectors.of(new) if new else (), strict=True):
            self._near[word] = _Near(vector, 0, {})
        for word in words:
            near = self._near[word]
            cosines = self._of_words[near.compared : len(self._words)] @ near.vector
            for at in np.flatnonzero(cosines >= _NEAR).tolist():
                near.cosines[near.compared + at] = float(cosines[at])
            best = sorted(near.cosines, key=near.cosines.__getitem__, reverse=True)[:_NEAREST]
            self._near[word] = _Near(
                near.vector, len(self._words), {at: near.cosines[at] for at in best}
            )
        return [
            [
                (_WORD + self._words[at], 1.0 if self._words[at] == word else cosine)
                for at, cosine in self._near[word].cosines.items()
            ]
            for word in words
        ]

    def _terms(self, words: Sequence[str]) -> Iterator[str]:
        yield from _groups_and_pairs(words)
        yield from (_WORD + word for word in words)

    def _add(self, at: int, text: str) -> list[str]:
        terms = super()._add(at, text)
        words = [term.removeprefix(_WORD) for term in terms if term.startswith(_WORD)]
        if words:
            vectors, known = self._vectors.of(words), len(self._words)
            self._words += words
            if len(self._words) > len(self._of_words):
                size = max(len(self._words), 2 * known, 1024)
                grown = np.zeros((size, vectors.shape[1]), np.float32)
                grown[:known] = self._of_words[:known]
                self._of_words = grown
            self._of_words[known : len(self._words)] = vectors
        return terms

    def _remove(self, text: str) -> None:
        super()._remove(text)
        while self._words and _WORD + self._words[-1] not in self._postings:
            self._words.pop()
        left = len(self._words)
        self._near = {word: near for word, near in self._near.items() if near.compared <= left}


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

    def of(self, words: Sequence[tuple[Postings, float]]) -> tuple[NDArray[np.int64], Floats]:
        """The turns [k] with one of the `words` in or beside them, and their weighted counts."""
        at = np.concatenate([postings.turns for postings, _ in words]).astype(np.int64) + 1
        told, asked = (
            np.concatenate([np.array(each[column]) * np.float32(share) for each, share in words])
            for column in (1, 2)
        )
        # Only these places take time; `np.unique` would take twice as long.
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
    words: Sequence[tuple[Postings, float]],
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


def _groups_and_pairs(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        yield from letter_groups(word)
    for pair in pairwise(words):
        yield " ".join(pair)
