"""Reads ids into a cache and a ledger: forward passes, surprisals, and the carried logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.attention_tracker import AttendingModel, AttentionTracker
from sirchat.engine.records import ContinuationScore, TurnRef
from sirchat.engine.scoring import surprisal, surprisal_of
from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.memory.sight import USUAL, Sight
from sirchat.models.attention_weights import AttentionObserver, PassWeights

PASS_BYTES = 256 * 2**20
"""Neither logits nor a layer's counted attention (float32) take more in one forward pass."""


class CausalModel(AttendingModel, Protocol):
    """What the engine needs of a model."""

    @property
    def context_length(self) -> int:
        """Tokens the model was made for."""

    @property
    def vocab_size(self) -> int:
        """Width V of the logits."""

    def new_cache(self, capacity: int) -> BoundedCache:
        """An empty cache with room for `capacity` rows."""

    def forward(
        self,
        ids: Sequence[int],
        cache: BoundedCache,
        sight: Sight = USUAL,
        listener: AttentionObserver | None = None,
    ) -> Tensor:
        """Read ids [m] behind the cache's rows, without committing; float32 logits [m, V].

        A `listener` hears what each layer attends to.
        """


@dataclass(frozen=True)
class Chunk:
    """Ids [m] that belong to one turn, each one's role, and its flags."""

    ids: Sequence[int]
    roles: Sequence[Role]
    flags: Sequence[int]
    place: TurnRef

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> Chunk:
        """Ids `start` to `end`."""
        at = slice(start, end)
        return Chunk(self.ids[at], self.roles[at], self.flags[at], self.place)


class Reader:
    """Reads for one conversation; `logits` [V], of the token to come, are None before the first.

    They are those of the last token read, as it was before any eviction. `counting` is what is
    counted of the attention that rows get; None for nothing.
    """

    def __init__(self, model: CausalModel, cache: BoundedCache, ledger: Ledger) -> None:
        self._model, self._cache, self._ledger = model, cache, ledger
        self._rows_per_pass = max(1, PASS_BYTES // (4 * model.vocab_size))
        self.logits: Tensor | None = None

    def read(
        self,
        chunk: Chunk,
        sequence: Callable[[], Tensor] | None = None,
        counting: AttentionStatsConfig | None = None,
    ) -> None:
        """Read, in parts for which there is memory; there must be room for all rows.

        If the last id is an anchor it sees, of what is held, only the rows that `sequence` tells.
        """
        opens = self._ledger.seen == 0
        start = 0
        with self._tracker(counting) as tracker:
            while start < len(chunk):
                part = chunk.part(start, start + self._at_once(len(chunk) - start, tracker))
                compacts_at_anchors = sequence is not None and part.flags[-1] & Flag.ANCHOR
                try:
                    policy_rows = sequence() if sequence and compacts_at_anchors else None
                    gaze = tracker.gaze()
                    logits = self._forward(part.ids, policy_rows, gaze)
                except torch.OutOfMemoryError:
                    if len(part) == 1:
                        raise
                    self._rows_per_pass = len(part) // 2
                    continue
                self._record(part, logits)
                tracker.note(gaze)
                start += len(part)
        if opens:
            self._ledger.rank_first_token(len(chunk))

    def read_again(
        self,
        ids: Sequence[int],
        positions: NDArray[np.int64],
        counting: AttentionStatsConfig | None = None,
    ) -> None:
        """Read into the cache alone ids [n] that stand at these `positions` of the stream."""
        self._cache.reserve(len(ids))
        start = 0
        with self._tracker(counting) as tracker:
            while start < len(ids):
                chunk = ids[start : start + self._at_once(len(ids) - start, tracker)]
                at = positions[start : start + len(chunk)]
                gaze = tracker.gaze()
                self._model.forward(chunk, self._cache, self._sight(at.tolist()), gaze)
                self._cache.commit(len(chunk), at)
                tracker.note(gaze)
                start += len(chunk)

    def score_continuation(self, ids: Sequence[int]) -> ContinuationScore:
        """How likely these ids are to come next; nothing is read by it, and nothing forgotten.

        For the one forward pass it takes, the cache has room for as many rows more.
        """
        if self.logits is None or not ids:
            raise RuntimeError("nothing has been read yet" if ids else "there is nothing to weigh")
        rows = [self.logits[None]]
        if len(ids) > 1:
            self._cache.reserve(self._cache.length + len(ids) - 1)
            rows.append(self._forward(ids[:-1]))
        with torch.inference_mode():
            logits = torch.cat([row.to(rows[0].device) for row in rows])  # [m, V]
            wanted = torch.tensor(ids, device=logits.device)
            greedy = bool((logits.argmax(-1) == wanted).all())
            return ContinuationScore(
                tuple(ids), tuple((-surprisal(logits, wanted)).tolist()), greedy
            )

    def _forward(
        self, ids: Sequence[int], policy_rows: Tensor | None = None, gaze: PassWeights | None = None
    ) -> Tensor:
        """Logits [m, V] of ids, of which the last sees only the held rows `own` [k], if given."""
        sees, held = None, self._cache.length
        if policy_rows is not None:
            sees = torch.ones(len(ids), held + len(ids), dtype=torch.bool).tril(held)
            sees[-1, :held] = False
            sees[-1, self._cache.slots_of(policy_rows)] = True
        begins = self._ledger.seen
        sight = self._sight(range(begins, begins + len(ids)), sees)
        return self._model.forward(ids, self._cache, sight, gaze)

    def _tracker(self, counting: AttentionStatsConfig | None) -> AttentionTracker:
        return AttentionTracker(counting, self._model, self._cache, self._ledger)

    def _at_once(self, count: int, tracker: AttentionTracker) -> int:
        """How many of `count` ids one forward pass has memory for."""
        return tracker.fitting(min(count, self._rows_per_pass), PASS_BYTES)

    def _sight(self, positions: Sequence[int], sees: Tensor | None = None) -> Sight:
        """Positions of the stream count only where keys stand there."""
        return Sight(sees, positions if self._cache.in_stream else None)

    def _record(self, chunk: Chunk, logits: Tensor) -> None:
        """Commit rows that were read; the carried logits score the first of them."""
        ids = list(chunk.ids)
        with torch.inference_mode():
            scores = [math.nan if self.logits is None else surprisal_of(self.logits, ids[0])]
            if len(ids) > 1:
                targets = torch.tensor(ids[1:], device=logits.device)
                scores += surprisal(logits[:-1], targets).tolist()
            # A copy, so that the other rows' logits are freed.
            self.logits = logits[-1].clone() if len(ids) > 1 else logits[-1]
        begins, place = self._ledger.seen, chunk.place
        self._cache.commit(len(ids), range(begins, begins + len(ids)))
        self._ledger.append(
            ids,
            scores,
            turn=place.turn,
            round=place.round,
            roles=list(chunk.roles),
            flags=list(chunk.flags),
        )
