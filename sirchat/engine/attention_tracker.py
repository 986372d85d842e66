"""Counts how much the rows that are held are looked at while a text is read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self

import torch

from sirchat.memory.attention import AttentionStatsConfig, PassAttention
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Ledger
from sirchat.models.attention_weights import PassWeights


class AttendingModel(Protocol):
    """A model, as far as its layers look at something."""

    @property
    def heads(self) -> int:
        """Of the queries, in a layer."""

    @property
    def narrow_layers(self) -> Collection[int]:
        """Numbers of the layers that see only a window of what is held."""


class AttentionTracker:
    """A block in which a text is read, in one forward pass or several.

    What is seen in them is counted as the block ends, all at once, so that the parts don't show.

    Args:
        counting: what is counted; None for nothing.
        model: what reads.
        cache, ledger: what is read into.
    """

    def __init__(
        self,
        counting: AttentionStatsConfig | None,
        model: AttendingModel,
        cache: BoundedCache,
        ledger: Ledger,
    ) -> None:
        self._counting, self._model = counting, model
        self._cache, self._ledger = cache, ledger
        self._passes: list[PassAttention] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._counting is not None:
            ledger = self._ledger
            held = ledger.held_positions[: self._own]
            ledger.attention.add(held, self._passes, ledger.log_decay, self._counting.window)

    @property
    def _own(self) -> int:
        """Rows in the cache, without those that a layer has for itself."""
        return self._cache.length - self._cache.inserted_count

    def fitting(self, count: int, size: int) -> int:
        """How many of `count` rows to come have a layer's weights in `size` bytes; one at least."""
        if self._counting is None:
            return count
        rows = self._cache.length + count
        return max(1, min(count, size // (4 * self._model.heads * rows)))

    def gaze(self) -> PassWeights | None:
        """What hears the next forward pass."""
        if self._counting is None:
            return None
        return PassWeights(self._counting, len(self._cache.layers), self._model.narrow_layers)

    def note(self, gaze: PassWeights | None) -> None:
        """Take note of a forward pass whose rows are in the cache by now."""
        weights = gaze.weights() if gaze is not None else None  # [m, n]
        if gaze is not None and weights is not None:
            policy_rows = self._cache.slots_of(torch.arange(self._own)).numpy()
            self._passes.append(PassAttention.of(weights[:, policy_rows], gaze.counting.window))
