"""Recall of one chat: before each turn, it restores the archived tokens that fit the turn.

For the search the model reads the turn once, which is then undone. A retriever that compares only
words needs no such reading, nor does the setting `recall_query: recent`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.engine.types import TurnRef
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Role, State
from sirchat.models.attention_hook import LayerQueries, QueryRecorder
from sirchat.models.model import LoadedModel
from sirchat.recall import RecalledTurn
from sirchat.recall.candidates import Candidates, Query
from sirchat.recall.retrievers import retriever
from sirchat.recall.retrievers.base import Retriever, WordRetriever
from sirchat.recall.wide_index import WideIndex
from sirchat.recall.word_index import TurnIndex, WordIndex
from sirchat.recall.word_vectors import WordVectors

_NO_WORDS = np.zeros(0)
_TURNS_AT_ONCE = 32
# Of the best score, of the score of either turn beside it, of the best score after the best turn.
# The first two were chosen with SmolLM2 and 80 facts in 4,000 tokens of real talk (seed 1, budget
# 256): replies named the fact in 0.26 of the cases, and in 0.12 if turns were restored as long as
# there was room. In both cases, the right reply was the likeliest of four in 0.81. Stricter numbers
# did as well there, but would have found less evidence for questions about LoCoMo and Realtalk. The
# rule for newer turns finds 0.94 of 64 corrections, and without it 0.83.
_LEAST_SHARE, _BESIDE, _LEAST_NEWER = 0.6, 0.8, 0.5


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
        self._restored = np.zeros(0, np.int64)  # by the last recall
        self._shared: dict[int, tuple[str, ...]] = {}  # words of the last recall, by turn
        self._index: TurnIndex = WordIndex()

    @property
    def scores(self) -> dict[int, float]:
        """The scores of the tokens restored for the last turn, by stream position."""
        return self._scores

    @property
    def turns(self) -> tuple[RecalledTurn, ...]:
        """The turns with tokens restored for the last turn, in order."""
        counts = Counter(self._engine.ledger.column("turn")[self._restored].tolist())
        return tuple(
            RecalledTurn(turn, counts[turn], self._shared.get(turn, ())) for turn in sorted(counts)
        )

    def undo(self) -> None:
        """Drop what the last recall found: its turn was undone."""
        self._scores, self._restored, self._shared = {}, self._restored[:0], {}

    def erase_words(self) -> None:
        """Drop all words of the chat; the next search by words reads its texts again."""
        self._index = WordIndex()
        self.undo()

    def restore_for_turn(
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
        residency, start = engine.residency, time.perf_counter()
        released, result, problem = self._restored, None, ""
        needs = retriever(recall.retriever)
        by_words = isinstance(needs, WordRetriever)
        is_something_evicted = engine.resident != engine.ledger.seen
        self._shared, words = {}, np.zeros(0)
        try:
            # A retriever that compares no words reads the turn first, which may evict tokens.
            if is_something_evicted or not by_words:
                if needs.needs_words:
                    words = self._index_for(needs).scores(texts, text)
                result = search(engine, self._model, ids, roles, at, words)
        except LookupError as error:
            problem = str(error)
        if result is not None:
            restore(engine, result, len(ids))
        self._restored = restored = residency.recalled_positions
        scores = _scores_of(restored, result)
        self._scores = dict(zip(restored.tolist(), scores, strict=True))
        if len(words):
            self._shared = self._index.shared_words([each.turn for each in self.turns], text)
        seconds = time.perf_counter() - start
        return Recollection(scores, self.turns, released, seconds, problem)

    def _index_for(self, needs: Retriever) -> TurnIndex:
        if needs.wide_words and not isinstance(self._index, WideIndex):
            self._index = WideIndex(WordVectors(self._model))
        elif not needs.wide_words and not isinstance(self._index, WordIndex):
            self._index = WordIndex()
        return self._index


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
    room = engine.residency.recall_room(len(ids))
    if recall is None or not room:
        return None
    needs = retriever(recall.retriever)
    if needs.needs_words and not len(words):
        raise ValueError("this retriever needs a score for each turn by its words")
    if isinstance(needs, WordRetriever):
        return tokens_of_best_turns(engine, words, room, is_auto=recall.n is None)
    longest = engine.budget  # of a longer turn only the end is read
    fits = engine.resident + len(ids) <= longest
    if fits and not engine.ledger.archived_count:
        return None
    if not needs.needs_turn or recall.query == "recent":
        recent = _recent_rows(engine) if needs.needs_turn else np.zeros(0, np.int64)
        return _score_archived(engine, model, recent, start, words)
    checkpoint, unused = engine.checkpoint(), nullcontext(QueryRecorder())
    with engine.store.unlimited():
        try:
            with model.recorded_queries() if needs.needs_queries else unused as recorder:
                for _ in engine.prefill(ids[-longest:], roles[-longest:], at):
                    pass
            turn = np.flatnonzero(engine.ledger.held_positions >= start)
            queries = recorder.queries(model.rotations)
            result = _score_archived(engine, model, turn, start, words, queries)
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


@dataclass(frozen=True)
class SearchResult:
    """Archived tokens and their scores.

    `positions` [n] are stream positions, ascending, `scores` [n] their scores. With the setting
    `recall_scope: layer`, `layers` [layers, n] has the scores in each layer; else it is None.
    """

    positions: Positions
    scores: Tensor
    layers: Tensor | None = None


def restore(engine: Engine, result: SearchResult, incoming: int) -> None:
    """Restore the best of these tokens for a turn of `incoming` ids."""
    recall, residency = engine.settings.recall, engine.residency
    room, span = residency.recall_room(incoming), recall.span if recall else 0
    pick = partial(choose, positions=result.positions, n=room, span=span)
    if result.layers is None:
        chosen = pick(result.scores)
        at = torch.from_numpy(np.searchsorted(result.positions, chosen))
        residency.begin_recall(chosen, incoming=incoming, scores=result.scores[at].numpy())
    else:
        layers = tuple(pick(scores) for scores in result.layers)
        residency.begin_recall(np.zeros(0, np.int64), layers, incoming=incoming)


def choose(scores: Tensor, positions: Positions, n: int, span: int = 0) -> Positions:
    """The stream positions, ascending, of at most n tokens: the best, each with its neighbours.

    `scores` [k] belong to `positions` [k]; of equal scores the newer token wins. Neighbours are at
    most `span` positions away, the nearest first.
    """
    newest_first = torch.argsort(scores.flip(0), descending=True, stable=True)
    order = positions[len(positions) - 1 - newest_first.numpy()]
    if not span:
        return np.sort(order[:n])
    candidates, chosen = set(positions.tolist()), dict[int, None]()
    for hit in order.tolist():
        for near in sorted(range(hit - span, hit + span + 1), key=lambda at: abs(at - hit)):
            if near in candidates and len(chosen) < n:
                chosen[near] = None
        if len(chosen) >= n:
            break
    return np.sort(np.fromiter(chosen, np.int64, len(chosen)))


def tokens_of_best_turns(
    engine: Engine, scores: NDArray[np.float64], room: int, *, is_auto: bool
) -> SearchResult | None:
    """The archived tokens of the turns with the highest `scores` [turns]; None without any.

    Turns are added, the newer of equal ones first, until they are `room` tokens; with `is_auto`
    only turns that fit the new one (`_fitting_turns`).
    """
    ledger = engine.ledger
    turns = ledger.column("turn")  # ascending; bisect, because numpy's search copies the column
    positions, of_token, count = list[Positions](), list[NDArray[np.float64]](), 0
    which = np.flatnonzero(_fitting_turns(scores)) if is_auto else np.arange(len(scores))
    best = which[::-1][np.argsort(-scores[which][::-1], kind="stable")]
    # Only the tokens of these turns are looked at, so the time does not grow with the archive.
    for at in range(0, len(best), _TURNS_AT_ONCE):
        if count >= room:
            break
        some = best[at : at + _TURNS_AT_ONCE]
        bounds = [(bisect_left(turns, turn), bisect_left(turns, turn + 1)) for turn in some]
        tokens = np.concatenate([np.arange(start, end) for start, end in bounds])
        score = np.repeat(scores[some], [end - start for start, end in bounds])
        flags = ledger.column("flags")[tokens]
        can_return = (
            (ledger.column("state")[tokens] != int(State.HELD))
            & (ledger.column("role")[tokens] != int(Role.TEMPLATE))  # it has no content
            & (flags & np.uint8(Flag.EXCLUDED | Flag.ERASED) == 0)
        )
        positions.append(tokens[can_return])
        of_token.append(score[can_return])
        count += len(positions[-1])
    if not count:
        return None
    joined = np.concatenate(positions)
    order = np.argsort(joined)
    return SearchResult(joined[order], torch.from_numpy(np.concatenate(of_token)[order]))


def _scores_of(positions: Positions, result: SearchResult | None) -> tuple[float, ...]:
    if result is None or not len(positions):
        return ()
    at = np.searchsorted(result.positions, positions)
    return tuple(result.scores[torch.from_numpy(at)].tolist())


def _score_archived(
    engine: Engine,
    model: LoadedModel,
    rows: NDArray[np.int64],
    start: int,
    words: NDArray[np.float64],
    layer_queries: Sequence[LayerQueries] = (),
) -> SearchResult | None:
    """Score the archived tokens from before `start`, by the cache's `rows`; None without any."""
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


def _recent_rows(engine: Engine) -> NDArray[np.int64]:
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


def _fitting_turns(scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    # Which turns [n] fit: the others distract the model. A turn after the best one may correct it:
    # it needs only half of the best score, if no turn beside it has a higher score than itself.
    best, beside = scores.max(initial=0.0), np.zeros_like(scores)
    beside[:-1] = scores[1:]
    beside[1:] = np.maximum(beside[1:], scores[:-1])
    is_newer = np.arange(len(scores)) > np.flatnonzero(scores == best).max(initial=-1)
    may_correct = is_newer & (scores >= _LEAST_NEWER * best) & (scores >= beside)
    is_high = (scores >= _LEAST_SHARE * best) & (scores >= _BESIDE * beside)
    fits: NDArray[np.bool_] = (may_correct | is_high) & (scores > 0)
    return fits
