"""Recall for one turn: archived rows are searched, by keys and by words (BM25)."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sirchat.chat.conversation import Turn
from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Event, Notice, RecalledTurn
from sirchat.chat.turn import OpenTurn
from sirchat.engine.engine import Engine
from sirchat.engine.records import SearchResult
from sirchat.engine.search import search
from sirchat.memory.recall import retriever
from sirchat.memory.segments import Positions
from sirchat.models.model import LoadedModel
from sirchat.text.template import TurnIds


class Recall:
    """Recalls archived rows into the cache of one engine."""

    def __init__(self, engine: Engine, model: LoadedModel, builder: EventBuilder) -> None:
        self._engine, self._model, self._builder = engine, model, builder
        self._scores: dict[int, float] = {}  # scores of the last recall, by position
        self._shared: dict[int, tuple[str, ...]] = {}  # words of the last recall, by turn
        self._words = WordIndex()

    @property
    def scores(self) -> dict[int, float]:
        """Scores of the rows that are recalled now, by position, ascending.

        After an undo or a resume the scores are not known; they are then 0.
        """
        return {
            at: self._scores.get(at, 0.0)
            for at in self._engine.contents.recalled_positions.tolist()
        }

    @property
    def turns(self) -> tuple[RecalledTurn, ...]:
        """The turns of which rows are recalled now; after an undo or a resume without words."""
        of_rows = self._engine.ledger.column("turn")[self._engine.contents.recalled_positions]
        turns, counts = np.unique(of_rows, return_counts=True)
        return tuple(
            RecalledTurn(turn, count, self._shared.get(turn, ()))
            for turn, count in zip(turns.tolist(), counts.tolist(), strict=True)
        )

    def erase_words(self) -> None:
        """Drop the index of the turns' words; it is built again when it is needed."""
        self._words, self._shared = WordIndex(), {}

    def renew(self, turn: OpenTurn, ids: TurnIds, text: str, turns: Sequence[Turn]) -> list[Event]:
        """Recall rows for a turn; first evict the rows that were recalled for the turn before.

        Args:
            turn: the turn under way.
            ids, text: the turn's token ids and its text.
            turns: all messages so far, this one included.
        """
        engine, recall = self._engine, self._engine.settings.recall
        if recall is None:
            return []
        events: list[Event] = []
        released, start = engine.contents.recalled_positions, time.perf_counter()
        engine.contents.clear_reserve()
        self._shared = {}
        words = None
        try:
            if retriever(recall.retriever).needs_words:
                words = self._words.scores(list(map(_TEXT, turns)), text)
            found = search(engine, self._model, ids.ids, ids.roles, turn.ref, words)
        except LookupError as error:
            events.append(
                Notice(f"no token can be restored: {error}; choose another method with /recall")
            )
            found = None
        if found is not None:
            engine.contents.fill_reserve(found)
        seconds = time.perf_counter() - start
        turn.stats.seconds_prefill += seconds
        chosen = engine.contents.recalled_positions
        scores = _scores(found, chosen)
        self._scores = dict(zip(chosen.tolist(), scores, strict=True))
        if words is not None:
            self._shared = {one.turn: self._words.shared(one.turn, text) for one in self.turns}
        if len(chosen) or len(released):
            events.append(
                self._builder.recalled(
                    turn.stats.index, recall.retriever, scores, released, self.turns, seconds
                )
            )
        return events


def _scores(found: SearchResult | None, positions: Positions) -> tuple[float, ...]:
    """The scores of these positions, each of which is one of the positions in `found`."""
    if found is None or not len(positions):
        return ()
    at = np.searchsorted(found.positions, positions)
    return tuple(found.scores[torch.from_numpy(at)].tolist())


_TEXT = attrgetter("text")
_NAMED = 3  # shared words that are named
_K1, _B = 1.5, 0.75
_Number = TypeVar("_Number", bound=np.floating)
_WORD = re.compile(r"\w+")
_LETTERS = 4
_DENSE = "\u2e80"  # characters from here: Chinese, Japanese, Korean; a term has two of them


class WordIndex:
    """BM25 over the turns of a conversation, which are split into words once.

    Lucene's variant, k1 1.5, b 0.75 (Robertson and Zaragoza 2009,
    https://doi.org/10.1561/1500000019), computed like in the library bm25s (Lù 2024,
    https://arxiv.org/abs/2407.03618), but only for the words of the query.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lengths = array("d")  # of each text, in terms
        self._found: dict[str, _Postings] = {}

    def scores(self, texts: Sequence[str], wanted: str) -> NDArray[np.float64]:
        """A score [n] for each text: how well it and its two neighbours match the query `wanted`.

        A term's rarity is counted over `texts`. Without a match, the score is 0.
        """
        self._update(texts)
        counts = Counter(term for term in terms_of(wanted) if term in self._found)
        scores = np.zeros(len(self._texts), np.float32)
        if not counts:
            return scores.astype(np.float64)
        lengths = _with_neighbours(np.array(self._lengths))
        norms = _K1 * ((1 - _B) + _B * lengths / lengths.mean())
        of_term = {term: self._scores_of(term, norms) for term in counts}
        for term in terms_of(wanted):
            if term in of_term:
                scores += of_term[term]
        return scores.astype(np.float64)

    def shared(self, turn: int, wanted: str) -> tuple[str, ...]:
        """Up to three words of `wanted`, the rarest first, that a turn has in a similar form.

        If it has none, words that the turns beside it have: it was found because of them.
        """
        beside = self._texts[max(0, turn - 1) : turn + 2]
        for said in (self._texts[turn : turn + 1], beside):
            terms = {term for text in said for term in terms_of(text)}
            rarity = dict[str, int]()
            for word in _WORD.findall(wanted):
                common = [term for term in terms_of(word) if term in terms]
                if 2 * len(common) > len(terms_of(word)):
                    rarity[word] = min(len(self._found[term].turns) for term in common)
            if rarity:
                return tuple(sorted(rarity, key=lambda word: rarity[word]))[:_NAMED]
        return ()

    def _scores_of(self, term: str, norms: NDArray[np.float64]) -> NDArray[np.float32]:
        """What one term adds to the score of each turn, [n]; `norms` [n] correct for lengths."""
        found = self._found[term]
        counts = np.zeros(len(norms), np.float32)
        counts[np.array(found.turns)] = np.array(found.counts)
        counts = _with_neighbours(counts)
        having = int(np.count_nonzero(counts))
        rarity = np.float32(math.log(1 + (len(norms) - having + 0.5) / (having + 0.5)))
        return (rarity * (counts / (norms + counts))).astype(np.float32)

    def _update(self, texts: Sequence[str]) -> None:
        """Remove texts that changed or no longer exist from the index, then add the new texts."""
        known, same = self._texts, min(len(self._texts), len(texts))
        if known[:same] != texts[:same]:
            same = next(at for at in range(same) if known[at] != texts[at])
        for text in reversed(known[same:]):
            for term in set(terms_of(text)):
                found = self._found[term]
                found.turns.pop()
                found.counts.pop()
                if not found.turns:
                    del self._found[term]
        del known[same:], self._lengths[same:]
        for at, text in enumerate(texts[same:], same):
            terms = terms_of(text)
            known.append(text)
            self._lengths.append(len(terms))
            for term, count in Counter(terms).items():
                found = self._found.setdefault(term, _Postings(array("i"), array("f")))
                found.turns.append(at)
                found.counts.append(count)


class _Postings(NamedTuple):
    """The turns [k] that have a term, ascending, and how often each has it."""

    turns: array[int]
    counts: array[float]


def _with_neighbours(numbers: NDArray[_Number]) -> NDArray[_Number]:
    """The sum of each number, the number before it and the number after it."""
    total = numbers.copy()
    total[1:] += numbers[:-1]
    total[:-1] += numbers[1:]
    return total


def terms_of(text: str) -> list[str]:
    """The terms of a text: all groups of four neighbouring letters in each of its words.

    The start and the end of a word count as letters. A shorter word is one term; Chinese, Japanese
    and Korean give pairs of characters.
    """
    terms = []
    for word in _WORD.findall(text.casefold()):
        marked = f"_{word}_"
        size = 2 if max(word) >= _DENSE else _LETTERS
        terms += [marked[at : at + size] for at in range(max(1, len(marked) - size + 1))]
    return terms
