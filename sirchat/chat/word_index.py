"""Indexes of the words in a conversation; they score how well earlier turns fit a new turn."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sirchat.memory.recall.base import with_neighbours
from sirchat.models.word_vectors import WordVectors

Floats = NDArray[np.float32]

_Number = TypeVar("_Number", bound=np.floating)
_WORD = re.compile(r"\w+")
_LETTERS = 4
_DENSE = "\u2e80"  # Chinese, Japanese and Korean begin here; a term has two characters
_NAMED = 3  # most words that `shared` returns for a turn


class TurnIndex(ABC):
    """Scores the turns of a conversation by the words that they share with a new turn."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @abstractmethod
    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        """Scores [n] of the turns with the `texts` [n]: how well each turn fits the text `wanted`.

        Words of the turns before and after a turn count, too. Words that few turns have count more.
        The score is 0 if no word matches.
        """

    @abstractmethod
    def _add(self, at: int, text: str) -> None:
        """Add the turn with index `at` and this text at the end of the word index."""

    @abstractmethod
    def _remove(self, text: str) -> None:
        """Remove the last turn from the word index; `text` must be its text."""

    @abstractmethod
    def _turns_with(self, term: str) -> array[int]:
        """The indices of the turns that contain a term, ascending, as 32-bit integers."""

    def shared(self, turns: Sequence[int], wanted: str) -> dict[int, tuple[str, ...]]:
        """For each turn, up to three words of `wanted` that it has, in the same or a similar form.

        The rarest word comes first; of equally rare words, the longest. Words that at least a fifth
        of the turns have are left out, unless there is no other word: then the rarest is returned.
        If a turn has none of the words, the words of the turns before and after it count, too.
        """
        asked = {word: terms_of(word) for word in _WORD.findall(wanted)}
        near = np.unique([turn + step for turn in turns for step in (-1, 0, 1)])
        terms: dict[int, set[str]] = {turn: set() for turn in near.tolist()}
        counts = dict[str, int]()  # of turns, for each term that any of them has
        for term in dict.fromkeys(term for own in asked.values() for term in own):
            having = np.frombuffer(self._turns_with(term), np.int32)  # no copy
            if len(having):
                counts[term] = len(having)
                at = np.searchsorted(having, near.astype(np.int32))
                for turn in near[having.take(at, mode="clip") == near].tolist():
                    terms[turn].add(term)
        found = dict[int, tuple[str, ...]]()
        for turn in turns:
            of_all = terms[turn - 1] | terms[turn] | terms[turn + 1]
            own = self._named(asked, terms[turn], counts)
            found[turn] = own or self._named(asked, of_all, counts)
        return found

    def _named(
        self, asked: Mapping[str, list[str]], terms: Set[str], counts: Mapping[str, int]
    ) -> tuple[str, ...]:
        """Up to three words of `asked`, the rarest first.

        `asked` maps each word to its terms. More than half of a word's terms must be in `terms`;
        `counts` maps each of these terms to the number of turns that have it.
        """
        rarity = dict[str, int]()
        for word, own in asked.items():
            common = [counts[term] for term in own if term in terms]
            if 2 * len(common) > len(own):
                rarity[word] = min(common)
        if not rarity:
            return ()
        rarest, *others = sorted(rarity, key=lambda word: (rarity[word], -len(word)))
        others = [word for word in others if 5 * rarity[word] < len(self._texts)]
        return (rarest, *others[: _NAMED - 1])

    def _update(self, texts: Sequence[str]) -> None:
        """Make the index that of `texts`: remove the turns that changed, and add the new ones."""
        known, least, step = self._texts, min(len(self._texts), len(texts)), 1
        while known[:least] != texts[:least]:  # mostly, only the last text has changed
            least, step = max(0, least - step), 8 * step
        pairs = enumerate(zip(known[least:], texts[least:], strict=False), least)
        same = next((at for at, (a, b) in pairs if a != b), min(len(known), len(texts)))
        while len(known) > same:
            self._remove(known.pop())
        for at, text in enumerate(texts[same:], same):
            self._add(at, text)
            known.append(text)


_K1, _B = 1.5, 0.75


class WordIndex(TurnIndex):
    """Scores turns by BM25 for the words of a new turn, the query.

    It is Lucene's variant of BM25, with k1 = 1.5 and b = 0.75 (Robertson and Zaragoza 2009,
    https://doi.org/10.1561/1500000019), computed as in the library bm25s (Lù 2024,
    https://arxiv.org/abs/2407.03618), but only for the words of the query. Terms are overlapping
    groups of four letters; a document is a turn with the turns before and after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lengths = array("d")  # of each text, in terms
        self._found: dict[str, _Postings] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        self._update(texts)
        terms = [term for term in terms_of(wanted) if term in self._found]
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
        """What one term adds to the BM25 score of each turn [n]; `norms` [n] correct for length."""
        found = self._found[term]
        counts = np.zeros(len(norms), np.float32)
        counts[np.array(found.turns)] = np.array(found.counts)
        counts = _and_beside(counts)
        having = int(np.count_nonzero(counts))
        rarity = np.float32(math.log(1 + (len(norms) - having + 0.5) / (having + 0.5)))
        return (rarity * (counts / (norms + counts))).astype(np.float32)

    def _turns_with(self, term: str) -> array[int]:
        return self._found[term].turns if term in self._found else array("i")

    def _add(self, at: int, text: str) -> None:
        terms = terms_of(text)
        self._lengths.append(len(terms))
        for term, count in Counter(terms).items():
            found = self._found.setdefault(term, _Postings(array("i"), array("f")))
            found.turns.append(at)
            found.counts.append(count)

    def _remove(self, text: str) -> None:
        self._lengths.pop()
        for term in set(terms_of(text)):
            found = self._found[term]
            found.turns.pop()
            found.counts.pop()
            if not found.turns:
                del self._found[term]


class _Postings(NamedTuple):
    """For one term: indices [k] of the turns that have it, ascending, and its count in each."""

    turns: array[int]
    counts: array[float]


def _and_beside(numbers: NDArray[_Number]) -> NDArray[_Number]:
    """For each number, the sum of it, the number before it and the number after it."""
    total = numbers.copy()
    total[1:] += numbers[:-1]
    total[:-1] += numbers[1:]
    return total


def terms_of(text: str) -> list[str]:
    """The terms of a text: all groups of four neighbouring letters in each of its words.

    The start and the end of a word count as letters. A shorter word is one term. In Chinese,
    Japanese and Korean, terms have two characters.
    """
    return [term for word in words_of(text) for term in _letters(word)]


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.casefold())


def _letters(word: str) -> list[str]:
    marked = f"_{word}_"
    size = 2 if max(word) >= _DENSE else _LETTERS
    return [marked[at : at + size] for at in range(max(1, len(marked) - size + 1))]


_SENTENCE = re.compile(r"[^.!?？。！\n]+[.!?？。！]*")
_POWER = 1.5  # of a term's rarity
_NEAR, _NEAREST = 0.25, 20  # least cosine of a similar word; number of similar words
_MEANING = 4  # weight of a word with its similar words; groups of letters and pairs have 1
_MOST = 50_000  # postings that a search looks at; the rarest terms come first


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
        self._lengths = _Lengths(array("f"), array("f"))
        self._terms: dict[str, _Fields] = {}  # groups of letters; pairs, with a space between
        self._words: dict[str, _Fields] = {}
        self._names: list[str] = []  # the keys of `_words`, in order
        self._of_names = np.zeros((0, vectors.dims), np.float32)  # vectors; some rows are free
        self._near: dict[str, _Near] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        self._update(texts)
        total = np.zeros(len(self._texts), np.float32)
        asked = [words for one in _SENTENCE.findall(wanted) if (words := words_of(one))]
        if not len(total) or not asked:
            return total.astype(np.float64)
        lengths = _pooled(np.array(self._lengths.told), np.array(self._lengths.asked))
        norms = (1 - _B) + _B * lengths / max(float(lengths.mean()), 1e-9)
        most = self._longest_postings(asked)
        for words in asked:
            found, sums = np.zeros(len(total), np.float32), _Sums(len(total))
            for term in dict.fromkeys(_terms(words)):
                fields = self._terms.get(term)
                if fields is not None and len(fields.turns) <= most:
                    _accumulate(found, sums, [(fields, 1.0)], norms, 1)
            for near in self._similar(list(dict.fromkeys(words))):
                of_words = [(self._words[name], weight) for name, weight in near]
                of_words = [one for one in of_words if len(one[0].turns) <= most]
                if of_words:
                    _accumulate(found, sums, of_words, norms, _MEANING)
            total += with_neighbours(found.astype(np.float64)).astype(np.float32) ** 2
        return np.sqrt(total).astype(np.float64)

    def _longest_postings(self, asked: Sequence[Sequence[str]]) -> int:
        """The largest number of turns that may have a term; a search ignores more frequent terms.

        With this limit, a search for the words `asked` reads at most `_MOST` entries of the index.
        """
        terms = [self._terms.get(term) for words in asked for term in _terms(words)]
        known = [*terms, *(self._words.get(word) for words in asked for word in words)]
        total = 0
        for size in sorted(len(fields.turns) for fields in known if fields is not None):
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
                found = index.get(term)
                if found is None:
                    found = index[term] = _Fields(array("i"), array("f"), array("f"))
                found.turns.append(at)
                found.told.append(told)
                found.asked.append(asked)
        self._lengths.told.append(sum(told for told, _ in words.values()))
        self._lengths.asked.append(sum(asked for _, asked in words.values()))
        if new:
            self._add_vectors(new)

    def _add_vectors(self, new: Sequence[str]) -> None:
        """Append the vectors of the words `new` to the array, which is enlarged if needed."""
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
                found = index[term]
                for column in found:
                    column.pop()
                if not found.turns:
                    del index[term]
        self._lengths.told.pop()
        self._lengths.asked.pop()
        left = len(self._words)  # the removed words were the last that were added
        if left < len(self._names):
            del self._names[left:]
            self._near = {w: near for w, near in self._near.items() if near.compared <= left}


class _Fields(NamedTuple):
    """For one term: the k turns that have it, ascending; its counts in statements and questions."""

    turns: array[int]
    told: array[float]
    asked: array[float]


class _Lengths(NamedTuple):
    """For each of the n turns: the number of words in its statements, and in its questions."""

    told: array[float]
    asked: array[float]


class _Near(NamedTuple):
    """A word's vector, and its cosines to the nearest of `compared` words of the index."""

    vector: Floats
    compared: int
    cosines: dict[int, float]


class _Sums:
    """Counts how often each turn has a term; the turns before and after it count with less weight.

    The class `WideIndex` tells these weights. Turns whose count is 0 take no time.
    """

    def __init__(self, turns: int) -> None:
        self._counts = np.zeros(turns + 2, np.float32)  # one place more at each end
        self._order = np.zeros(turns + 2, np.int64)

    def of(self, found: Sequence[tuple[_Fields, float]]) -> tuple[NDArray[np.int64], Floats]:
        """The turns [k] with a word of `found`, or beside one that has it; the words' counts."""
        at = np.concatenate([fields.turns for fields, _ in found]).astype(np.int64) + 1
        told, asked = (
            np.concatenate([np.array(fields[of]) * np.float32(own) for fields, own in found])
            for of in (1, 2)
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
    found: Sequence[tuple[_Fields, float]],
    norms: Floats,
    weight: float,
) -> None:
    """Add to the scores [n] of all turns the part that one term contributes.

    The term consists of the words `found`, each with a weight. `norms` [n] correct for the lengths
    of the turns; `weight` is the weight of the whole term.
    """
    turns, counts = sums.of(found)
    having = float(np.minimum(counts, 1).sum(dtype=np.float64))
    rarity = math.log(1 + max(0.0, len(scores) - having + 0.5) / (having + 0.5)) ** _POWER
    scores[turns] += np.float32(weight * rarity) * (counts / (counts + norms[turns]))


def _pooled(told: Floats, asked: Floats) -> Floats:
    """Weighted lengths [n] of the turns, in words, with shares of the turns before and after."""
    own, after, before = _shares(told, asked)
    own[1:] += after[:-1]
    own[:-1] += before[1:]
    return own


def _shares(told: Floats, asked: Floats) -> tuple[Floats, Floats, Floats]:
    """What the counts [n] in each turn add to the turn itself, to the turn after, and before it."""
    half = np.float32(0.5)
    return told + half * asked, half * told + asked, half * (told + asked)


def _terms(words: Sequence[str]) -> Iterator[str]:
    """Yield a sentence's terms: groups of letters in its words, and pairs of neighbouring words."""
    for word in words:
        yield from _letters(word)
    for pair in pairwise(words):
        yield " ".join(pair)


_Counts = dict[str, tuple[int, int]]


def _counted(text: str) -> tuple[_Counts, _Counts]:
    """By term, and by word, how often a text has it: in its statements, and in its questions."""
    terms, words = (Counter[str](), Counter[str]()), (Counter[str](), Counter[str]())
    for sentence in _SENTENCE.findall(text):
        found, is_question = words_of(sentence), sentence.rstrip().endswith(("?", "？"))
        terms[is_question].update(_terms(found))
        words[is_question].update(found)
    return _paired(*terms), _paired(*words)


def _paired(told: Counter[str], asked: Counter[str]) -> _Counts:
    return {term: (told[term], asked[term]) for term in dict.fromkeys((*told, *asked))}
