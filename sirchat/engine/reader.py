"""Reads token ids: runs forward passes, and adds the tokens to the KV cache and the ledger.

The logits after the last token are stored; the next token's surprisal is computed from them.
"""

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
from sirchat.engine.types import ChosenToken, ContinuationScore, PrefillChunk
from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Flag, Ledger
from sirchat.models.attention_hook import AttentionObserver
from sirchat.models.surprisal import PassResult, surprisal, surprisal_of

PASS_BYTES = 256 * 2**20
"""Maximum size in bytes of the logits of one forward pass, counted as float32.

The attention weights of one layer in a forward pass have the same limit.
"""


class CausalModel(AttendingModel, Protocol):
    """Protocol: the properties and methods of a language model that the engine needs."""

    @property
    def context_length(self) -> int:
        """The model's maximum context length, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary: the number of logits after each token."""

    @property
    def window(self) -> int | None:
        """How many cache rows sliding-window layers attend to; None without such layers."""

    def new_cache(self, capacity: int) -> BoundedCache:
        """An empty KV cache with room for `capacity` rows (tokens)."""

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
        """Run ids [m] through the model, after the rows of `cache`; returns the logits [m, V].

        For the arguments see `LoadedModel.forward`.
        """

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
        """Run ids [m] through the model, after the rows of `cache`, like `forward`.

        Returns only the surprisals of all ids but the first, and the logits after the last id.
        """

    def share_unpacked(self, count: int) -> AbstractContextManager[None]:
        """A context manager that makes a series of `count` long forward passes faster.

        Use it around each of these passes: work that is the same for all passes is done only once.
        `count` may be an estimate.
        """


@dataclass(eq=False)
class _Ahead:
    """Guessed next ids [m], with the logits that the model has computed for them in advance.

    Their keys and values are in the cache's buffers after the held rows, but do not count as held.
    `logits` [m, V] are the logits after each id, `scores` [m] the ids' scores by the model's
    scorer, `start` is the cache slot of the first id, and `used` is how many of the ids have turned
    out right and have been read.
    """

    ids: Sequence[int]
    logits: Tensor
    scores: list[float]
    start: int
    used: int = 0


class Reader:
    """Reads the token ids of one conversation into its KV cache and its ledger (table of tokens).

    Attributes:
        logits: raw logits [V] for the next token, computed when the last token was read. Evictions
            do not change them. None before the first token.
    """

    def __init__(self, model: CausalModel, cache: BoundedCache, ledger: Ledger) -> None:
        self._model, self._cache, self._ledger = model, cache, ledger
        self._rows_per_pass = max(1, PASS_BYTES // (4 * model.vocab_size))
        if cache.reads_singly:
            self._rows_per_pass = 1
        self.logits: Tensor | None = None
        self._ahead: _Ahead | None = None

    def look_ahead(self, ids: Sequence[int]) -> None:
        """Compute in advance the logits after each of `ids` [m], in case they are read next.

        The ids do not count as read. The cache must have room for them. When another id is read,
        the computed logits are discarded. Raises RuntimeError if the model has recurrent or
        convolution layers, because no id can be removed from their state.
        """
        if self._cache.has_state:
            raise RuntimeError("layers with a state can't look ahead")
        scores: list[float] = []
        positions = self._next(len(ids))
        logits = self._model.forward(ids, self._cache, positions=positions, scores=scores)
        self._ahead = _Ahead(ids, logits, scores, self._cache.length)

    def is_ahead(self, token_id: int) -> bool:
        """Whether the logits after `token_id` were computed in advance, for the next position."""
        ahead = self._ahead
        return (
            ahead is not None
            and ahead.used < len(ahead.ids)
            and ahead.ids[ahead.used] == token_id
            and ahead.start + ahead.used == self._cache.length
        )

    def drop_ahead(self) -> int | None:
        """Discard the logits that `look_ahead` has computed.

        Returns how many of the ids given to `look_ahead` have been read since then; None if at most
        one id was computed in advance, so that there was no guess.
        """
        ahead, self._ahead = self._ahead, None
        return None if ahead is None or len(ahead.ids) == 1 else ahead.used

    def chosen(self, token_id: int) -> ChosenToken:
        """Make the record of `token_id`, the id that is read next.

        The caller may compute the logits after this id in one pass with other conversations, and
        give them to the record's function `accept`. If the caller does not, the id is read alone.
        """

        def accept(logits: Tensor, score: float) -> None:
            self._ahead = _Ahead([token_id], logits, [score], self._cache.length)

        at = self._ledger.seen if self._cache.absolute_positions else self._cache.length
        return ChosenToken(token_id, at, self._cache, accept)

    def read(
        self,
        chunk: PrefillChunk,
        visible_to_anchor: Callable[[], Tensor] | None = None,
        stats: AttentionStatsConfig | None = None,
    ) -> None:
        """Read a chunk of ids, in as many forward passes as the memory requires.

        The cache must have room for the chunk's rows.

        Args:
            chunk: the ids to read.
            visible_to_anchor: returns the numbers [k] of the held rows to which the chunk's last id
                attends if it is an anchor, the end of a sentence or round; None: anchors attend to
                all rows.
            stats: which attention weights are recorded; None to record none.
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
        """Compute the keys and values of `ids` [n] again, and write them into the empty cache.

        The ledger already has these tokens, at stream `positions` [n]. `stats` says which attention
        weights are recorded, None none.
        """
        self._cache.grow_to(len(ids))
        start = 0
        with self._tracker(stats) as tracker:
            while start < len(ids):
                part = ids[start : start + self._pass_size(len(ids) - start, tracker)]
                at = positions[start : start + len(part)]
                observer = tracker.observer()
                self._model.read(
                    part, self._cache, positions=self._absolute(at.tolist()), observer=observer
                )
                self._cache.commit(len(part), at)
                tracker.add(observer)
                start += len(part)

    def repeat(self, rows: Tensor, layers: int, most: int) -> None:
        """Read tokens in the cache a second time, after all rows in the cache.

        `rows` [k] are the numbers of the tokens' rows. The highest attention weight that each of
        these rows receives from the second reading is recorded (see `RepeatAttention`). The keys
        and values of the second reading do not stay in the cache. `layers` is the number of layers
        whose attention is recorded, 0 for all. At most `most` ids are read in one pass. With stream
        positions, reading stops before a position exceeds the model's context length.
        """
        held = self._ledger.held_positions
        ids = self._ledger.column("token_id")[held]
        wide = AttentionStatsConfig(layers).counted_layers(
            len(self._cache.row_layers), self._model.sliding_layers
        )
        size = 4 * self._model.heads * (self._cache.length + most)  # bytes of a row's weights
        most = max(1, min(most, PASS_BYTES // size, self._rows_per_pass))
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            end = self._ledger.seen + len(part)
            if self._cache.absolute_positions and end > self._model.context_length:
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
        """The mean attention weight [n] that each row in the cache gets from certain tokens.

        For this, the tokens of `rows` are read again at their own positions. Each of them attends
        to itself and to the rows before it. The mean is over heads, layers and queries. Cache and
        ledger stay the same, but the cache's buffers may grow.

        Args:
            rows: numbers [k] of the held rows whose tokens are read again, ascending; at least one.
            visible: mask [n] of the held rows that may receive attention.

        Returns None if the model exposes no attention weights, if its sliding-window layers do not
        see the whole cache, or if it has recurrent or convolution layers.
        """
        cache, held = self._cache, self._ledger.held_positions
        ids, shared = self._ledger.column("token_id")[held], torch.arange(len(held))
        size = 4 * self._model.heads * (cache.length + len(rows))  # bytes of a row's weights
        most = max(1, min(len(rows), PASS_BYTES // size, self._rows_per_pass))
        narrow = self._model.window is not None and cache.length + most > self._model.window
        if narrow or cache.has_state:
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
            observer = PassWeights(range(len(cache.row_layers)))
            self._model.read(
                ids[part.numpy()].tolist(),
                cache,
                visible=torch.cat([sees, torch.eye(len(part), dtype=torch.bool)], dim=1),
                positions=held[part.numpy()].tolist() if cache.absolute_positions else own.tolist(),
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
        """Compute the log-probability of each id of several alternative continuations.

        All alternatives (lists of ids) are read in one forward pass, in which no alternative
        attends to another. If the model has sliding-window, recurrent or convolution layers, each
        alternative is read in its own pass. Cache and ledger stay the same, but the cache's buffers
        may grow. Returns one result per alternative.
        """
        first = self.logits
        if first is None or not all(alternatives):
            raise RuntimeError(
                "nothing has been read yet" if first is None else "there is nothing to score"
            )
        apart = self._model.window is not None or self._cache.has_state
        if len(alternatives) > 1 and apart:
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
        """Read the m ids of all alternatives; returns the logits [m, V] after each id, in order.

        Each alternative attends to the rows in the cache and to its own ids only.
        """
        held, sizes = self._cache.length, [len(one) for one in alternatives]
        ids = [token_id for one in alternatives for token_id in one]
        if self._cache.reads_singly:
            return self._forward_singly(ids)
        if len([size for size in sizes if size]) == 1:
            return self._model.forward(ids, self._cache, positions=self._next(len(ids)))
        number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))  # [m]
        own = (number[:, None] == number).tril()  # [m, m]
        visible = torch.cat([torch.ones(len(ids), held, dtype=torch.bool), own], dim=1)
        start = self._ledger.seen if self._cache.absolute_positions else held
        positions = [start + at for size in sizes for at in range(size)]
        return self._model.forward(ids, self._cache, visible=visible, positions=positions)

    def _forward_singly(self, ids: Sequence[int]) -> Tensor:
        """Read ids [m] one by one, then remove them; returns the logits [m, V] after each id."""
        cache, logits, seen = self._cache, list[Tensor](), self._ledger.seen
        state, rows = cache.state, torch.arange(cache.length - cache.inserted_count)
        try:
            for at, token_id in enumerate(ids, seen):
                positions = self._absolute([at])
                logits.append(self._model.forward([token_id], cache, positions=positions))
                cache.commit(1, [at])
        finally:
            cache.keep(rows)
            cache.state = state
        return torch.cat(logits)

    def _read(
        self,
        ids: Sequence[int],
        visible: Tensor | None = None,
        observer: AttentionObserver | None = None,
        scores: list[float] | None = None,
    ) -> PassResult:
        """Run ids [m] through the model, or use the logits that were computed in advance.

        If `visible` is given, the last id attends only to the cache rows with these numbers, and to
        itself. If a list `scores` is given, each id's score by the trained scorer is appended.
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
        """Stream positions of the next `count` ids; None if keys are rotated by cache slots."""
        return self._absolute(range(self._ledger.seen, self._ledger.seen + count))

    def _tracker(self, stats: AttentionStatsConfig | None) -> AttentionTracker:
        return AttentionTracker(stats, self._model, self._cache, self._ledger)

    def _pass_size(self, count: int, tracker: AttentionTracker) -> int:
        """How many of the next `count` ids to read in one forward pass, to limit its memory."""
        return tracker.rows_within(min(count, self._rows_per_pass), PASS_BYTES)

    def _absolute(self, positions: Sequence[int]) -> Sequence[int] | None:
        """The `positions` if keys are rotated by stream positions, None if by cache slots."""
        return positions if self._cache.absolute_positions else None

    def _record(self, chunk: PrefillChunk, found: PassResult, learned: list[float]) -> None:
        """Add the ids of `chunk`, which the model has read, to the cache's rows and to the ledger.

        `found` has the surprisals of all ids but the first. The first id's surprisal is computed
        from the logits after the previous token. `learned` are scores by the model's scorer.
        """
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
    """Compute the log-probabilities of ids [m] from the logits [m, V] that predict each id."""
    with torch.inference_mode():
        wanted = torch.tensor(ids, device=logits.device)
        greedy = bool((logits.argmax(-1) == wanted).all())
        return ContinuationScore(tuple(ids), tuple((-surprisal(logits, wanted)).tolist()), greedy)
