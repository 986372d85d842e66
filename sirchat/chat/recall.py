"""What comes back for a turn: searched for when it arrives, gone when the next one does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from sirchat.chat.events import Event, Notice
from sirchat.chat.reports import Reports
from sirchat.chat.snapshot import Positions
from sirchat.chat.turn import OpenTurn
from sirchat.engine.engine import Engine
from sirchat.engine.records import SearchResult
from sirchat.engine.search import search
from sirchat.models.attention_hook import observed_by
from sirchat.models.model import LoadedModel
from sirchat.text.template import TurnIds


class TurnRecall:
    """What one engine brings back, and how well it fits."""

    def __init__(self, engine: Engine, model: LoadedModel) -> None:
        self._engine = engine
        self._model = model
        self._fits: dict[int, float] = {}  # by position, of what came back last

    @property
    def fits(self) -> dict[int, float]:
        """What is back now: how well each fits, by position, ascending.

        After an undo or a resume the tokens are known, and not how well they fit: 0.
        """
        return {at: self._fits.get(at, 0.0) for at in self._engine.recalled_positions.tolist()}

    def renew(self, turn: OpenTurn, ids: TurnIds, reports: Reports) -> Iterator[Event]:
        """Bring back what this turn looks for; what came back for the last one leaves."""
        engine, recall = self._engine, self._engine.settings.recall
        if recall is None:
            return
        released, start = engine.recalled_positions, time.perf_counter()
        engine.release()
        try:
            found = self._search(turn, ids)
        except LookupError as error:
            yield Notice(f"nothing can be recalled: {error}; choose another /recall")
            found = None
        if found is not None:
            engine.bring(found)
        turn.tally.seconds_prefill += time.perf_counter() - start
        chosen = engine.recalled_positions
        scores = _scores(found, chosen)
        self._fits = dict(zip(chosen.tolist(), scores, strict=True))
        if len(chosen) or len(released):
            yield reports.recalled(turn.tally.index, recall.measure, scores, released)

    def _search(self, turn: OpenTurn, ids: TurnIds) -> SearchResult | None:
        model = self._model
        hear = partial(observed_by, model.module)
        return search(self._engine, model.rotations, hear, ids.ids, ids.roles, turn.place)


def _scores(found: SearchResult | None, positions: Positions) -> tuple[float, ...]:
    """The scores of these positions, which are among those found."""
    if found is None or not len(positions):
        return ()
    at = np.searchsorted(found.positions, positions)
    return tuple(found.scores[torch.from_numpy(at)].tolist())
