"""Recall of one chat: before each turn, it restores the archived tokens that fit the turn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sirchat.engine.engine import Engine
from sirchat.engine.types import TurnRef
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel
from sirchat.recall import RecalledTurn
from sirchat.recall.retrievers import retriever
from sirchat.recall.retrievers.base import Retriever, WordRetriever
from sirchat.recall.search import SearchResult, restore, search
from sirchat.recall.wide_index import WideIndex
from sirchat.recall.word_index import TurnIndex, WordIndex
from sirchat.recall.word_vectors import WordVectors


@dataclass(frozen=True)
class Recollection:
    """What recall did for a turn.

    `scores` and `turns` are those of the restored tokens, `released` the positions of the tokens
    restored for the turn before; `problem` says why the retriever could not search, or is empty.
    """

    scores: tuple[float, ...]
    turns: tuple[RecalledTurn, ...]
    released: Positions
    seconds: float
    problem: str = ""


class Recall:
    """Restores archived tokens that fit a new turn, to the KV cache of one engine."""

    def __init__(self, engine: Engine, model: LoadedModel) -> None:
        self._engine, self._model = engine, model
        self._scores: dict[int, float] = {}  # of the last recall, by position
        self._shared: dict[int, tuple[str, ...]] = {}  # words of the last recall, by turn
        self._index: TurnIndex = WordIndex()

    @property
    def scores(self) -> dict[int, float]:
        """The restored tokens that are still held: their scores by stream position.

        Scores are not saved: all are 0 after an undo, and in a chat that was loaded.
        """
        restored = self._engine.residency.recalled_positions
        return {at: self._scores.get(at, 0.0) for at in restored.tolist()}

    @property
    def turns(self) -> tuple[RecalledTurn, ...]:
        """The turns with restored tokens that are still held, in order.

        The words are not saved: there are none after an undo, and in a chat that was loaded.
        """
        of_tokens = self._engine.ledger.column("turn")[self._engine.residency.recalled_positions]
        counts = Counter(of_tokens.tolist())
        return tuple(
            RecalledTurn(turn, counts[turn], self._shared.get(turn, ())) for turn in sorted(counts)
        )

    def undo(self) -> None:
        """Drop what the last recall found: its turn was undone."""
        self._scores, self._shared = {}, {}

    def erase_words(self) -> None:
        """Drop all words of the chat; the next search by words reads its texts again."""
        self._index, self._shared = WordIndex(), {}

    def renew(
        self,
        ids: Sequence[int],
        roles: Sequence[Role],
        at: TurnRef,
        text: str,
        texts: Sequence[str],
    ) -> Recollection | None:
        """Restore the archived tokens that fit a new turn, instead of those of the turn before.

        The new turn has `ids`, `roles` and `text`, and is read after this; `texts` are those of all
        turns, the last one empty. Returns None if recall is off.
        """
        engine, recall = self._engine, self._engine.settings.recall
        if recall is None:
            return None
        contents, start = engine.residency, time.perf_counter()
        released, result, problem = contents.recalled_positions, None, ""
        needs = retriever(recall.retriever)
        by_words = isinstance(needs, WordRetriever)
        if not by_words:  # words may find the same tokens again, which then stay
            contents.clear_reserve()
        self._shared, words = {}, np.zeros(0)
        try:
            if not (by_words and engine.resident == engine.ledger.seen):  # something is evicted
                if needs.needs_words:
                    words = self._index_for(needs).scores(texts, text)
                result = search(engine, self._model, ids, roles, at, words)
        except LookupError as error:
            problem = str(error)
        if result is not None:
            restore(engine, result)
        elif by_words:
            contents.clear_reserve()
        restored = contents.recalled_positions
        scores = _scores_of(restored, result)
        self._scores = dict(zip(restored.tolist(), scores, strict=True))
        if len(words):
            self._shared = self._index.shared([each.turn for each in self.turns], text)
        seconds = time.perf_counter() - start
        return Recollection(scores, self.turns, released, seconds, problem)

    def _index_for(self, needs: Retriever) -> TurnIndex:
        if needs.wide_words and not isinstance(self._index, WideIndex):
            self._index = WideIndex(WordVectors.of_model(self._model))
        elif not needs.wide_words and not isinstance(self._index, WordIndex):
            self._index = WordIndex()
        return self._index


def _scores_of(positions: Positions, result: SearchResult | None) -> tuple[float, ...]:
    if result is None or not len(positions):
        return ()
    at = np.searchsorted(result.positions, positions)
    return tuple(result.scores[torch.from_numpy(at)].tolist())
