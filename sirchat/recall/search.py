"""Searches the archive for the tokens that a new turn needs.

The model reads the turn once, and this reading is undone; later it reads the turn again, with the
found tokens restored. A retriever that compares only words needs no first reading, nor does the
setting `recall_query: recent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.engine.types import TurnRef
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Role, State
from sirchat.models.attention_hook import LayerQueries, QueryRecorder
from sirchat.models.model import LoadedModel
from sirchat.recall.candidates import Candidates, Query
from sirchat.recall.choice import SearchResult, best_turns
from sirchat.recall.retrievers import retriever
from sirchat.recall.retrievers.base import WordRetriever

_NO_WORDS = np.zeros(0)


def search(
    engine: Engine,
    model: LoadedModel,
    ids: Sequence[int],
    roles: Sequence[Role],
    at: TurnRef,
    words: NDArray[np.float64] = _NO_WORDS,
) -> SearchResult | None:
    """Score the archived tokens for a turn of m `ids`; the engine's state is the same afterwards.

    `words` has a score for each earlier turn, which some retrievers need. Returns None if no token
    can be restored; raises LookupError if the model's queries don't fit its KV cache.
    """
    recall, start = engine.settings.recall, engine.ledger.seen
    reserve = engine.residency.divide().reserve
    if recall is None or not reserve:
        return None
    needs = retriever(recall.retriever)
    if needs.needs_words and not len(words):
        raise ValueError("this retriever needs a score for each turn by its words")
    if isinstance(needs, WordRetriever):
        return best_turns(engine, words, is_auto=recall.n is None)
    longest = engine.budget - reserve  # of a longer turn only the end is read
    fits = engine.resident - engine.residency.recalled + len(ids) <= longest
    if fits and not engine.ledger.archived_count:
        return None
    if not needs.needs_turn or recall.query == "recent":
        recent = _recent(engine) if needs.needs_turn else np.zeros(0, np.int64)
        return _scored(engine, model, recent, start, words)
    checkpoint, unused = engine.checkpoint(), nullcontext(QueryRecorder())
    with engine.store.unlimited():
        try:
            with model.recorded_queries() if needs.needs_queries else unused as recorder:
                for _ in engine.prefill(ids[-longest:], roles[-longest:], at):
                    pass
            turn = np.flatnonzero(engine.ledger.held_positions >= start)
            queries = recorder.queries(model.rotations)
            result = _scored(engine, model, turn, start, words, queries)
        finally:
            engine.undo(checkpoint)
    return _still_archived(engine, result) if recall.scope == "layer" else result


def softened(scores: Tensor, positions: Positions) -> Tensor:
    """Even out the scores [layers, n] of tokens at ascending stream `positions` [n].

    Takes the root of each score, less the layer's lowest, so that a few very high ones don't decide
    alone, and adds to half of it a quarter of the roots of the tokens right before and after.
    """
    roots = (scores - scores.min(dim=1, keepdim=True).values).sqrt()
    adjacent = torch.from_numpy(np.diff(positions) == 1).to(roots)  # [n - 1]
    smoothed = roots / 2  # the answer often stands beside the token that the queries match
    smoothed[:, 1:] += roots[:, :-1] * adjacent / 4
    smoothed[:, :-1] += roots[:, 1:] * adjacent / 4
    return smoothed


def weighted(scores: Tensor, surprisal: NDArray[np.float64]) -> Tensor:
    """The scores [layers, n], less each layer's lowest, times the `surprisal` [n] in nats."""
    lowest = scores.min(dim=1, keepdim=True).values
    return (scores - lowest) * torch.from_numpy(surprisal).to(scores.dtype)


def _scored(
    engine: Engine,
    model: LoadedModel,
    rows: NDArray[np.int64],
    start: int,
    words: NDArray[np.float64],
    layer_queries: Sequence[LayerQueries] = (),
) -> SearchResult | None:
    """Compare the cache's `rows` with the archived tokens from before `start`; None without any."""
    ledger, recall, archive = engine.ledger, engine.settings.recall, engine.store.archive
    reachable = engine.store.reachable()
    is_archived = ledger.column("state")[reachable] == State.ARCHIVED
    archived = reachable[is_archived & (reachable < start)]
    archived = archived[archive.has(archived)]
    if recall is None or not len(archived):
        return None
    positions = ledger.held_positions[rows]
    of_query = engine.cache.first_written(torch.from_numpy(rows), positions)
    of_template = ledger.column("role")[positions] == Role.TEMPLATE
    query = Query(of_query, layer_queries, of_template, words, start)
    candidates = Candidates(archive, archived, query, model.rotations, ledger)
    scores = retriever(recall.retriever).score(candidates)
    if recall.soft:
        scores = softened(scores, archived)
    if recall.weight == "surprisal":
        scores = weighted(scores, ledger.surprisal_of(archived))
    by_layer = scores.expand(len(model.rotations), -1) if recall.scope == "layer" else None
    return SearchResult(archived, scores.mean(0), by_layer)


def _recent(engine: Engine) -> NDArray[np.int64]:
    """The cache's rows of the newest tokens, as many as the policy's `recent`; no sinks."""
    held, seen = engine.ledger.held_positions, engine.ledger.seen
    window = int(getattr(engine.settings.policy, "recent", 0)) or seen
    return np.flatnonzero((held >= seen - window) & (held >= engine.settings.sinks))


def _still_archived(engine: Engine, result: SearchResult | None) -> SearchResult | None:
    # Reading the turn may have evicted tokens that undoing it has restored to all layers.
    if result is None or result.layers is None:
        return None
    there = engine.ledger.column("state")[result.positions] == State.ARCHIVED
    if not there.any():
        return None
    which = torch.from_numpy(there)
    return SearchResult(result.positions[there], result.scores[which], result.layers[:, which])
