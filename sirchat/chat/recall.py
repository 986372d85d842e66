"""Recall: searches the archived tokens, by keys or words, and restores those relevant to a turn."""

from __future__ import annotations

import time

import numpy as np
import torch

from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Event, Notice, RecalledTurn
from sirchat.chat.state import Turn
from sirchat.chat.turn import OpenTurn
from sirchat.chat.word_index import TurnIndex, WideIndex, WordIndex
from sirchat.engine.engine import Engine
from sirchat.engine.search import search
from sirchat.engine.types import SearchResult
from sirchat.memory.recall import retriever
from sirchat.memory.recall.base import Retriever, WordRetriever
from sirchat.memory.segments import Positions
from sirchat.models.model import LoadedModel
from sirchat.text.template import TurnIds


class Recall:
    """Restores archived tokens that are relevant to a new turn, to the KV cache of one engine."""

    def __init__(self, engine: Engine, model: LoadedModel, builder: EventBuilder) -> None:
        self._engine, self._model, self._builder = engine, model, builder
        self._scores: dict[int, float] = {}  # scores of the last recall, by position
        self._shared: dict[int, tuple[str, ...]] = {}  # words of the last recall, by turn
        self._index: TurnIndex = WordIndex()
        self._indexed = list[Turn](), list[str]()  # finished turns, and their texts

    @property
    def scores(self) -> dict[int, float]:
        """The tokens that recall restored and that are still held: their scores by stream position.

        The score says how well a token fits the new turn. Scores are not saved, so all are 0 after
        an undo, or after a saved chat was loaded.
        """
        return {
            at: self._scores.get(at, 0.0)
            for at in self._engine.residency.recalled_positions.tolist()
        }

    @property
    def turns(self) -> tuple[RecalledTurn, ...]:
        """The turns whose tokens recall restored and which are still held, in order.

        Each record also has the words that this turn and the new turn have in common. These words
        are not saved, so there are none after an undo, or after a saved chat was loaded.
        """
        of_rows = self._engine.ledger.column("turn")[self._engine.residency.recalled_positions]
        turns, counts = np.unique(of_rows, return_counts=True)
        return tuple(
            RecalledTurn(turn, count, self._shared.get(turn, ()))
            for turn, count in zip(turns.tolist(), counts.tolist(), strict=True)
        )

    def undo(self) -> None:
        """Drop the scores and the shared words that the last recall found: its turn was undone."""
        self._scores, self._shared = {}, {}

    def erase_words(self) -> None:
        """Drop the index of all words of the chat; the next search by words builds it again."""
        self._index, self._shared, self._indexed = WordIndex(), {}, ([], [])

    def renew(self, turn: OpenTurn, ids: TurnIds, text: str, turns: list[Turn]) -> list[Event]:
        """Restore the archived tokens that are relevant to a new turn.

        Tokens that recall restored for the turn before are evicted, unless they are found again.
        Nothing happens if recall is off.

        Args:
            turn: the new turn, which is read after this.
            ids, text: the new turn's token ids and its text.
            turns: all messages of the chat; the last is the new turn.

        Returns the events to yield: `Recalled`, and a notice if the retriever can't search.
        """
        engine, recall = self._engine, self._engine.settings.recall
        if recall is None:
            return []
        events: list[Event] = []
        released, start = engine.residency.recalled_positions, time.perf_counter()
        words, found, needs = None, None, retriever(recall.retriever)
        by_words = isinstance(needs, WordRetriever)
        if not by_words:  # words may find the same rows again, which then stay
            engine.residency.clear_reserve()
        self._shared = {}
        try:
            holds_all = engine.resident == engine.ledger.seen
            searches = not (holds_all and by_words)
            if needs.needs_words and searches:
                words = self._index_for(needs).scores(self._texts(turns), text)
            if searches:
                found = search(engine, self._model, ids.ids, ids.roles, turn.ref, words)
        except LookupError as error:
            events.append(
                Notice(f"no token can be restored: {error}; choose another retriever with /recall")
            )
        if found is not None:
            engine.residency.fill_reserve(found)
        elif by_words:
            engine.residency.clear_reserve()
        chosen = engine.residency.recalled_positions
        scores = _scores(found, chosen)
        self._scores = dict(zip(chosen.tolist(), scores, strict=True))
        if words is not None:
            self._shared = self._index.shared([one.turn for one in self.turns], text)
        seconds = time.perf_counter() - start
        turn.stats.seconds_prefill += seconds
        if len(chosen) or len(released):
            events.append(
                self._builder.recalled(
                    turn.stats.index, recall.retriever, scores, released, self.turns, seconds
                )
            )
        return events

    def _index_for(self, needs: Retriever) -> TurnIndex:
        """The word index that a retriever searches; it replaces an index of another class."""
        wanted = WideIndex if needs.wide_words else WordIndex
        if not isinstance(self._index, wanted):
            self._index = WideIndex(self._model.word_vectors) if needs.wide_words else WordIndex()
        return self._index

    def _texts(self, turns: list[Turn]) -> list[str]:
        """The texts of all turns; those of turns that did not change come from the last search."""
        finished, (known, texts) = turns[:-1], self._indexed
        if finished[: len(known)] != known:
            known, texts = [], []
        texts += [one.text for one in finished[len(known) :]]
        self._indexed = finished, texts
        return [*texts, turns[-1].text]


def _scores(found: SearchResult | None, positions: Positions) -> tuple[float, ...]:
    """The scores of the tokens at these stream positions, as the search result `found` has them.

    `found` must contain all the positions; if it is None, the result is empty.
    """
    if found is None or not len(positions):
        return ()
    at = np.searchsorted(found.positions, positions)
    return tuple(found.scores[torch.from_numpy(at)].tolist())
