"""Reads ids into a cache and a ledger: forward passes, surprisal, and the carried logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.attention_tracker import (
    AttendingModel,
    AttentionTracker,
    HighestWeights,
    PassWeights,
)
from sirchat.engine.records import ContinuationScore, TurnRef
from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.models.attention_hook import AttentionObserver
from sirchat.models.surprisal import PassResult, surprisal, surprisal_of

PASS_BYTES = 256 * 2**20
"""Maximum bytes of logits, or of a counted layer's attention weights, in one pass (float32)."""


class CausalModel(AttendingModel, Protocol):
    """What the engine needs from a model."""

    @property
    def context_length(self) -> int:
        """Number of tokens that the model was made for."""

    @property
    def vocab_size(self) -> int:
        """Width V of the logits."""

    @property
    def window(self) -> int | None:
        """Width of the sliding-window layers, in held rows; None without such layers."""

    def new_cache(self, capacity: int) -> BoundedCache:
        """An empty cache with room for `capacity` rows."""

    def forward(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        *,
        visible: Tensor | None = None,
        positions: Sequence[int] | None = None,
        observer: AttentionObserver | None = None,
        scores: list[float] | None = None,
    ) -> Tensor:
        """Read ids [m] after the cache's rows; returns logits [m, V]: see `LoadedModel.forward`."""

    def read(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        *,
        visible: Tensor | None = None,
        positions: Sequence[int] | None = None,
        observer: AttentionObserver | None = None,
        scores: list[float] | None = None,
    ) -> PassResult:
        """Like `forward`, but returns only the surprisal of the ids and the last logits."""

    def several_passes(self) -> AbstractContextManager[None]:
        """A context manager to use around each of several long passes; they share some work."""


@dataclass(frozen=True)
class PrefillChunk:
    """Ids [m] of one turn, with the role and the flags of each."""

    ids: Sequence[int]
    roles: Sequence[Role]
    flags: Sequence[int]
    turn: TurnRef

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> PrefillChunk:
        """The ids numbered `start` to `end` - 1, as a chunk."""
        at = slice(start, end)
        return PrefillChunk(self.ids[at], self.roles[at], self.flags[at], self.turn)


@dataclass(eq=False)
class _Ahead:
    """Guessed next ids: their rows are written after the cache's rows, but do not count yet.

    `logits` [m, V] are the logits after each id, `scores` [m] the learned scores of the ids,
    `start` is the row of the first id, and `used` is the number of ids that have been read since.
    """

    ids: Sequence[int]
    logits: Tensor
    scores: list[float]
    start: int
    used: int = 0


class Reader:
    """Reads ids for one conversation.

    Attributes:
        logits: raw logits [V] for the next token, computed when the last token was read; later
            evictions do not change them. None before the first token.
    """

    def __init__(self, model: CausalModel, cache: BoundedCache, ledger: Ledger) -> None:
        self._model, self._cache, self._ledger = model, cache, ledger
        self._rows_per_pass = max(1, PASS_BYTES // (4 * model.vocab_size))
        self.logits: Tensor | None = None
        self._ahead: _Ahead | None = None

    def look_ahead(self, ids: Sequence[int]) -> None:
        """Compute the logits after each of ids [m], in case they are read next; does not read them.

        The cache must have room for the ids. Reading any other id discards what was computed.
        """
        scores: list[float] = []
        positions = self._next(len(ids))
        logits = self._model.forward(ids, self._cache, positions=positions, scores=scores)
        self._ahead = _Ahead(ids, logits, scores, self._cache.length)

    def is_ahead(self, token_id: int) -> bool:
        """Whether `look_ahead` has computed the logits for the case that this id is read next."""
        ahead = self._ahead
        return (
            ahead is not None
            and ahead.used < len(ahead.ids)
            and ahead.ids[ahead.used] == token_id
            and ahead.start + ahead.used == self._cache.length
        )

    def drop_ahead(self) -> int | None:
        """Discard the ids of `look_ahead`; returns how many of them were read; None without ids."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead.used

    def read(
        self,
        chunk: PrefillChunk,
        visible_to_anchor: Callable[[], Tensor] | None = None,
        stats: AttentionStatsConfig | None = None,
    ) -> None:
        """Read a chunk in passes that fit the memory; the cache must have room for its rows.

        Args:
            chunk: what is read.
            visible_to_anchor: gives the held rows [k] that the last id sees if it is an anchor;
                None if an anchor sees all rows like any other token.
            stats: which attention is counted; None for none.
        """
        start = 0
        with self._tracker(stats) as tracker:
            while start < len(chunk):
                part = chunk.part(start, start + self._pass_size(len(chunk) - start, tracker))
                ends_at_anchor = part.flags[-1] & Flag.ANCHOR
                try:
                    visible = visible_to_anchor() if visible_to_anchor and ends_at_anchor else None
                    observer, scores = tracker.observer(), list[float]()
                    found = self._read(part.ids, visible, observer, scores)
                except torch.OutOfMemoryError:
                    if len(part) == 1:
                        raise
                    self._rows_per_pass = len(part) // 2
                    continue
                self._record(part, found, scores)
                tracker.add(observer)
                start += len(part)

    def read_again(
        self,
        ids: Sequence[int],
        positions: NDArray[np.int64],
        stats: AttentionStatsConfig | None = None,
    ) -> None:
        """Read ids [n] into the cache again; the ledger already has them, at stream `positions`."""
        self._cache.grow_to(len(ids))
        start = 0
        with self._tracker(stats) as tracker:
            while start < len(ids):
                part = ids[start : start + self._pass_size(len(ids) - start, tracker)]
                at = positions[start : start + len(part)]
                observer = tracker.observer()
                self._model.read(
                    part, self._cache, positions=self._in_stream(at.tolist()), observer=observer
                )
                self._cache.commit(len(part), at)
                tracker.add(observer)
                start += len(part)

    def repeat(self, rows: Tensor, layers: int, most: int) -> None:
        """Read held row numbers `rows` [k] again after all others; record the attention they get.

        Nothing else changes. At most `most` ids are read at a time; `layers` is the number of
        layers that count, 0 for all. If keys have stream positions, reading stops before a position
        exceeds the model's context.
        """
        held = self._ledger.held_positions
        ids = self._ledger.column("token_id")[held]
        wide = AttentionStatsConfig(layers).counted_layers(
            len(self._cache.layers), self._model.sliding_layers
        )
        size = 4 * self._model.heads * (self._cache.length + most)  # bytes of a row's weights
        most = max(1, min(most, PASS_BYTES // size, self._rows_per_pass))
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            end = self._ledger.seen + len(part)
            if self._cache.in_stream and end > self._model.context_length:
                return
            self._cache.grow_to(self._cache.length + len(part))
            observer = HighestWeights(wide, self._cache.slots_of(part))
            self._read(ids[part.numpy()].tolist(), observer=observer)
            highest = observer.mean()
            if highest is not None:
                self._ledger.attention.repeat.set(held[part.numpy()], highest)

    def attention_from(
        self, rows: Tensor, visible: NDArray[np.bool_]
    ) -> NDArray[np.float64] | None:
        """Mean attention [n] that each held row gets when some rows are read once more.

        They are read at their own positions, so that each sees itself and what was before it. No
        state changes, but the cache may get larger. The mean is over heads, layers and queries.

        Args:
            rows: held row numbers [k], ascending, not empty.
            visible: [n], which of the held rows may be seen.

        Returns None if the model exposes no attention weights, or if its sliding-window layers do
        not see all of the cache.
        """
        cache, held = self._cache, self._ledger.held_positions
        ids, shared = self._ledger.column("token_id")[held], torch.arange(len(held))
        size = 4 * self._model.heads * (cache.length + len(rows))  # bytes of a row's weights
        most = max(1, min(len(rows), PASS_BYTES // size, self._rows_per_pass))
        if self._model.window is not None and cache.length + most > self._model.window:
            return None
        cache.grow_to(cache.length + most)
        self._ahead = None  # its rows are overwritten
        slots, total = cache.slots_of(shared), np.zeros(len(held))
        hidden = slots[torch.from_numpy(~visible)]
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            own = slots[part]
            sees = torch.arange(cache.length) < own[:, None]  # [k, n]
            sees[:, hidden] = False
            observer = PassWeights(range(len(cache.layers)))
            self._model.read(
                ids[part.numpy()].tolist(),
                cache,
                visible=torch.cat([sees, torch.eye(len(part), dtype=torch.bool)], dim=1),
                positions=held[part.numpy()].tolist() if cache.in_stream else own.tolist(),
                observer=observer,
            )
            weights = observer.mean()  # [k, n + k]
            if weights is None:
                return None
            total += weights[:, slots.numpy()].sum(0, dtype=np.float64)
            total[part.numpy()] += weights[:, cache.length :].diagonal()
        return total / len(rows)

    def score_continuations(
        self, alternatives: Sequence[Sequence[int]]
    ) -> tuple[ContinuationScore, ...]:
        """Log-probabilities of each alternative's ids as the next tokens; no state changes.

        All alternatives are read in one forward pass in which none sees another, or in one pass
        each if the model has sliding-window layers. No row stays, but the cache may get larger.
        """
        first = self.logits
        if first is None or not all(alternatives):
            raise RuntimeError(
                "nothing has been read yet" if first is None else "there is nothing to score"
            )
        if len(alternatives) > 1 and self._model.window is not None:
            return tuple(self.score_continuations([one])[0] for one in alternatives)
        read = [one[:-1] for one in alternatives]  # the last id's own logits are not needed
        logits = first[None][:0]
        if any(read):
            self._cache.grow_to(self._cache.length + sum(map(len, read)))
            logits = self._forward_apart(read)
        scores, start = [], 0
        for ids in alternatives:
            end = start + len(ids) - 1
            rows = torch.cat([first[None].to(logits.device), logits[start:end]])  # [m, V]
            scores.append(_continuation(ids, rows))
            start = end
        return tuple(scores)

    def _forward_apart(self, alternatives: Sequence[Sequence[int]]) -> Tensor:
        """Logits [m, V] of all alternatives' ids, in order; none sees the ids of another."""
        held, sizes = self._cache.length, [len(one) for one in alternatives]
        ids = [token_id for one in alternatives for token_id in one]
        if len([size for size in sizes if size]) == 1:
            return self._model.forward(ids, self._cache, positions=self._next(len(ids)))
        number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))  # [m]
        own = (number[:, None] == number).tril()  # [m, m]
        visible = torch.cat([torch.ones(len(ids), held, dtype=torch.bool), own], dim=1)
        start = self._ledger.seen if self._cache.in_stream else held
        positions = [start + at for size in sizes for at in range(size)]
        return self._model.forward(ids, self._cache, visible=visible, positions=positions)

    def _read(
        self,
        ids: Sequence[int],
        visible: Tensor | None = None,
        observer: AttentionObserver | None = None,
        scores: list[float] | None = None,
    ) -> PassResult:
        """Read ids [m]; if row numbers `visible` are given, the last id sees no other held rows.

        If a list `scores` is given, the learned score of each id is added to it.
        """
        if len(ids) == 1 and observer is None and visible is None and self.is_ahead(ids[0]):
            assert self._ahead is not None
            self._ahead.used += 1
            logits = self._ahead.logits[self._ahead.used - 1]
            if scores is not None:
                scores.append(self._ahead.scores[self._ahead.used - 1])
            return PassResult(logits.new_empty(0), logits.clone())
        self._ahead = None
        mask, held = None, self._cache.length
        if visible is not None:
            mask = torch.ones(len(ids), held + len(ids), dtype=torch.bool).tril(held)
            mask[-1, :held] = False
            mask[-1, self._cache.slots_of(visible)] = True
        return self._model.read(
            ids,
            self._cache,
            visible=mask,
            positions=self._next(len(ids)),
            observer=observer,
            scores=scores,
        )

    def _next(self, count: int) -> Sequence[int] | None:
        """Stream positions of the next `count` ids; None if keys are rotated to cache slots."""
        return self._in_stream(range(self._ledger.seen, self._ledger.seen + count))

    def _tracker(self, stats: AttentionStatsConfig | None) -> AttentionTracker:
        return AttentionTracker(stats, self._model, self._cache, self._ledger)

    def _pass_size(self, count: int, tracker: AttentionTracker) -> int:
        """How many of `count` ids one forward pass has memory for."""
        return tracker.rows_within(min(count, self._rows_per_pass), PASS_BYTES)

    def _in_stream(self, positions: Sequence[int]) -> Sequence[int] | None:
        """These stream positions, or None if keys are rotated to cache slots instead."""
        return positions if self._cache.in_stream else None

    def _record(self, chunk: PrefillChunk, found: PassResult, learned: list[float]) -> None:
        """Commit a chunk that was read; the carried logits give the first id's surprisal."""
        ids = list(chunk.ids)
        with torch.inference_mode():
            nats = [math.nan if self.logits is None else surprisal_of(self.logits, ids[0])]
            nats += found.surprisal.tolist()
        self.logits = found.logits
        begins, ref = self._ledger.seen, chunk.turn
        self._cache.commit(len(ids), range(begins, begins + len(ids)))
        self._ledger.append(
            ids,
            nats,
            turn=ref.turn,
            round=ref.round,
            roles=list(chunk.roles),
            flags=list(chunk.flags),
            learned_scores=learned,
        )


def _continuation(ids: Sequence[int], logits: Tensor) -> ContinuationScore:
    """The score of ids [m], given the logits [m, V] that predict them."""
    with torch.inference_mode():
        wanted = torch.tensor(ids, device=logits.device)
        greedy = bool((logits.argmax(-1) == wanted).all())
        return ContinuationScore(tuple(ids), tuple((-surprisal(logits, wanted)).tolist()), greedy)
