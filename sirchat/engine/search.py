"""Search the archive for what a turn needs: read the turn, score what is archived, take it back.

The turn is read as it will be read for good, and this pass is rolled back wholly: cache, ledger,
archive and draws are as they were. Then the found rows come into the reserve, and the turn is read
again with them in place. With `query: recent` nothing is read to search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.engine.records import SearchResult, TurnRef
from sirchat.memory.cache import LayerRotation
from sirchat.memory.draws import Purpose, uniform
from sirchat.memory.ledger import Role, State
from sirchat.memory.ranking import Ranking, wants_index
from sirchat.memory.recall import Query, RecallSettings
from sirchat.memory.segments import Positions, Rows
from sirchat.models.attention_hook import QueryRecorder

Listening = Callable[[QueryRecorder], AbstractContextManager[None]]


def search(
    engine: Engine,
    rotations: Sequence[LayerRotation],
    observed_by: Listening,
    ids: Sequence[int],
    roles: Sequence[Role],
    place: TurnRef,
) -> SearchResult | None:
    """Score what is archived by what these ids look for; the engine is as it was afterwards.

    None where there is nothing to search. Of a turn longer than the policy's share of the budget
    only the end is read. Raises LookupError where the model's queries do not fit its cached keys.
    """
    recall, start = engine.settings.recall, engine.ledger.seen
    longest = engine.budget - engine.reserve
    fits = engine.resident - engine.recalled + len(ids) <= longest
    if recall is None or not engine.reserve or (fits and not engine.store.archived):
        return None
    if recall.query == "recent":
        return _score(engine, recall, _recent(engine), rotations, start)
    checkpoint = engine.checkpoint()
    with engine.store.unlimited():
        try:
            ear = QueryRecorder()
            with observed_by(ear) if recall.measure == "attention" else nullcontext():
                for _ in engine.feed(ids[-longest:], roles[-longest:], place):
                    pass
            mine = np.flatnonzero(engine.ledger.held_positions >= start)
            query = Query(_first_written(engine, mine), ear.heard(rotations))
            found = _score(engine, recall, query, rotations, start)
        finally:
            engine.undo(checkpoint)
    return _still_archived(engine, found) if recall.scope == "layer" else found


def _score(
    engine: Engine,
    recall: RecallSettings,
    query: Query,
    rotations: Sequence[LayerRotation],
    before: int,
) -> SearchResult | None:
    """The archived rows among the first `before` of the stream, or the best, and their scores."""
    ledger = engine.ledger
    archived = np.flatnonzero(ledger.column("state")[:before] == State.ARCHIVED)
    archive = engine.store.archive
    archived = archived[archive.has(archived)]
    if not len(archived):
        return None
    if recall.measure == "random":
        draws = uniform(ledger.seed, Purpose.RECALL, archived, before)
        scores = torch.from_numpy(draws).expand(len(rotations), -1)
        return _found(archived, scores, recall)
    ranking = Ranking(archive, archived, query, recall, rotations, ledger.surprisal_of)
    ranked = ranking.proposed() if wants_index(recall, len(archived)) else ranking.all()
    return _found(ranked.positions, ranked.scores, recall)


def _found(positions: Positions, scores: Tensor, recall: RecallSettings) -> SearchResult:
    return SearchResult(positions, scores.mean(0), scores if recall.scope == "layer" else None)


def _recent(engine: Engine) -> Query:
    """The recent window as it is now: the policy's, or all but the sinks."""
    held, seen = engine.ledger.held_positions, engine.ledger.seen
    window = int(getattr(engine.settings.policy, "recent", 0)) or seen
    recent = (held >= seen - window) & (held >= engine.settings.sinks)
    return Query(_first_written(engine, np.flatnonzero(recent)))


def _first_written(engine: Engine, slots: Positions) -> Rows:
    held = engine.ledger.held_positions
    return engine.cache.first_written(torch.from_numpy(slots), held[slots])


def _still_archived(engine: Engine, found: SearchResult | None) -> SearchResult | None:
    """Without what is held again: a layer has it already."""
    if found is None or found.layers is None:
        return None
    there = engine.ledger.column("state")[found.positions] == State.ARCHIVED
    if not there.any():
        return None
    which = torch.from_numpy(there)
    return SearchResult(found.positions[there], found.scores[which], found.layers[:, which])
