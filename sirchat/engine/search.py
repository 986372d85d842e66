"""Searches the archive for the rows that a turn needs.

The turn is read once to search, and this pass is undone: cache, ledger, archive and random draws
are as before. Then the found rows are put into the reserve, and the turn is read again with them in
place. With `query: recent`, and by `bm25`, nothing is read to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.engine.records import SearchResult, TurnRef
from sirchat.memory.cache import LayerRotation
from sirchat.memory.draws import Purpose, uniform
from sirchat.memory.ledger import Role, State
from sirchat.memory.ranking import ArchivedTurns, Ranking, Scores, wants_index
from sirchat.memory.recall import BY_TURN, Query, RecallSettings
from sirchat.memory.segments import Positions, Rows
from sirchat.models.attention_hook import QueryRecorder, observed_by
from sirchat.models.model import LoadedModel


def search(
    engine: Engine,
    model: LoadedModel,
    ids: Sequence[int],
    roles: Sequence[Role],
    at: TurnRef,
    words: Scores | None = None,
) -> SearchResult | None:
    """Score the archived rows for a turn; the engine's state is the same afterwards.

    Args:
        engine: whose archive is searched.
        model: the engine's model.
        ids, roles: of the turn [m]; of a long turn only the end, as much as the policy may hold, is
            read.
        at: the turn.
        words: a score for each turn so far, by the words it has in common with this one; needed by
            the measures `BY_TURN`.

    Returns:
        Scores of the candidates; None if there is nothing to search.

    Raises:
        LookupError: the model's queries can't be compared with its cached keys.
    """
    recall, start = engine.settings.recall, engine.ledger.seen
    longest = engine.budget - engine.contents.budget.reserve
    fits = engine.resident - engine.contents.recalled + len(ids) <= longest
    if recall is None or not engine.contents.budget.reserve or (fits and not engine.store.archived):
        return None
    if recall.measure == "bm25":
        return _by_turn(engine, model, words, start)
    if recall.query == "recent":
        return _score(engine, recall, _recent(engine), model.rotations, start)
    checkpoint, recorder = engine.checkpoint(), QueryRecorder()
    by_attention = recall.measure == "attention"
    with engine.store.unlimited():
        try:
            with observed_by(model.module, recorder) if by_attention else nullcontext():
                for _ in engine.feed(ids[-longest:], roles[-longest:], at):
                    pass
            turn = np.flatnonzero(engine.ledger.held_positions >= start)
            if recall.measure in BY_TURN:
                found = _by_turn(engine, model, words, start, turn)
            else:
                query = Query(_first_written(engine, turn), recorder.queries(model.rotations))
                found = _score(engine, recall, query, model.rotations, start)
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
    ledger, archive = engine.ledger, engine.store.archive
    archived = _archived(engine, before)
    if not len(archived):
        return None
    if recall.measure == "random":
        draws = uniform(ledger.seed, Purpose.RECALL, archived, before)
        scores = torch.from_numpy(draws).expand(len(rotations), -1)
        return _found(archived, scores, recall)
    ranking = Ranking(archive, archived, query, recall, rotations, ledger.surprisal_of)
    ranked = ranking.proposed() if wants_index(recall, len(archived)) else ranking.all()
    return _found(ranked.positions, ranked.scores, recall)


def _by_turn(
    engine: Engine,
    model: LoadedModel,
    words: Scores | None,
    before: int,
    turn: Positions | None = None,
) -> SearchResult | None:
    """The archived rows among the first `before`, and the scores of the turns that they belong to.

    By words alone, or also by the keys of the turn that is in the slots `turn` now. Tokens of the
    chat template come last: they say nothing, and are a sixth of a short turn.
    """
    if words is None:
        raise ValueError("a measure by words needs the turns' scores")
    ledger, archived = engine.ledger, _archived(engine, before)
    if not len(archived):
        return None
    turns = ArchivedTurns(engine.store.archive, archived, ledger.column("turn")[archived])
    roles, said = ledger.column("role"), np.zeros(0, np.int64)
    if turn is not None:
        said = turn[roles[ledger.held_positions[turn]] != Role.TEMPLATE]
    if len(said):
        middle = len(model.rotations) // 2
        rows = _first_written(engine, said)
        one = Rows(rows.positions, rows.written_at, rows.tensors[2 * middle : 2 * middle + 2])
        scores = turns.by_both(words, one, middle, model.rotations[middle])
    else:
        scores = turns.by_words(words)
    scores[torch.from_numpy(roles[archived] == Role.TEMPLATE)] = float(scores.min()) - 1
    return SearchResult(archived, scores)


def _archived(engine: Engine, before: int) -> Positions:
    """The archived rows among the first `before` of the stream."""
    reachable = engine.store.reachable()
    is_archived = engine.ledger.column("state")[reachable] == State.ARCHIVED
    archived: Positions = reachable[is_archived & (reachable < before)]
    return archived[engine.store.archive.has(archived)]


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
