"""Recall for one turn: archived rows are searched as the turn arrives, and leave with the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from sirchat.chat.conversation import Turn
from sirchat.chat.events import Event, Notice
from sirchat.chat.lexical import TurnWords
from sirchat.chat.reports import Reports
from sirchat.chat.snapshot import Positions
from sirchat.chat.turn import OpenTurn
from sirchat.engine.engine import Engine
from sirchat.engine.records import SearchResult
from sirchat.engine.search import search
from sirchat.memory.recall import BY_TURN
from sirchat.models.model import LoadedModel
from sirchat.text.template import TurnIds


class TurnRecall:
    """Recalls archived rows into one engine."""

    def __init__(self, engine: Engine, model: LoadedModel) -> None:
        self._engine = engine
        self._model = model
        self._scores: dict[int, float] = {}  # by position, of the last recall
        self._words = TurnWords()

    @property
    def scores(self) -> dict[int, float]:
        """Scores of the rows that are recalled now, by position, ascending.

        After an undo or a resume the rows are known, but not their scores: 0.
        """
        return {at: self._scores.get(at, 0.0) for at in self._engine.recalled_positions.tolist()}

    def forget_words(self) -> None:
        """Drop what is kept of the turns' texts; it is made again when it is needed."""
        self._words = TurnWords()

    def renew(
        self, turn: OpenTurn, ids: TurnIds, text: str, turns: Sequence[Turn], reports: Reports
    ) -> list[Event]:
        """Recall what a turn needs; the rows recalled for the last one leave.

        Args:
            turn: the turn under way.
            ids, text: what it says.
            turns: all messages so far, this one included.
            reports: makes the events.
        """
        engine, recall = self._engine, self._engine.settings.recall
        if recall is None:
            return []
        events: list[Event] = []
        released, start = engine.recalled_positions, time.perf_counter()
        engine.clear_reserve()
        try:
            words = None
            if recall.measure in BY_TURN:
                words = self._words.scores([one.text for one in turns], text)
            found = search(engine, self._model, ids.ids, ids.roles, turn.ref, words)
        except LookupError as error:
            events.append(Notice(f"nothing can be recalled: {error}; choose another /recall"))
            found = None
        if found is not None:
            engine.fill_reserve(found)
        turn.tally.seconds_prefill += time.perf_counter() - start
        chosen = engine.recalled_positions
        scores = _scores(found, chosen)
        self._scores = dict(zip(chosen.tolist(), scores, strict=True))
        if len(chosen) or len(released):
            events.append(reports.recalled(turn.tally.index, recall.measure, scores, released))
        return events


def _scores(found: SearchResult | None, positions: Positions) -> tuple[float, ...]:
    """The scores of these positions, which are among those found."""
    if found is None or not len(positions):
        return ()
    at = np.searchsorted(found.positions, positions)
    return tuple(found.scores[torch.from_numpy(at)].tolist())
