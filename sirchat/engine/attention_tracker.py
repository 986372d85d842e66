"""Records the attention weights that held tokens receive while ids are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import torch
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, PassAttention
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Ledger
from sirchat.models.attention_hook import AttentionCall, PassWeights
from sirchat.models.model import LoadedModel


# Not a `PassWeights`: a step that computes weights itself gives only sums over heads.
class HeadWeights:
    """Records the mean as `PassWeights` does, and each head's weights for the newest queries."""

    def __init__(self, layers: Collection[int], window: int) -> None:
        self._mean, self._window = PassWeights(layers), window
        self._newest: list[Tensor] = []  # [H_q, at most `window`, n] of each layer

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._mean.layers:
            weights = call.weights()
            self._mean.add(weights.mean(0))
            self._newest.append(weights[:, max(0, weights.shape[1] - self._window) :].cpu())

    def record(self, length: int, window: int) -> PassAttention | None:
        record = self._mean.record(length, window)
        if record:
            record = record._replace(newest=torch.stack(self._newest)[..., :length].numpy())
        return record


class AttentionTracker:
    """Context manager: records attention weights while ids are read in one or more passes.

    The ledger gets the weights when the block ends, so that the number of passes makes no
    difference. With `config` None, nothing is recorded.
    """

    def __init__(
        self,
        config: AttentionStatsConfig | None,
        model: LoadedModel,
        cache: BoundedCache,
        ledger: Ledger,
    ) -> None:
        self._config, self._model = config, model
        self._cache, self._ledger = cache, ledger
        self._passes: list[PassAttention] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._config is None:
            return
        held = self._ledger.held_positions[: self._cache.length]
        self._ledger.attention.add(held, self._passes, self._ledger.log_decay, self._config.window)

    def observer(self) -> PassWeights | HeadWeights | None:
        config = self._config
        if config is None:
            return None
        layers = config.recorded_layers(len(self._cache.row_layers), self._model.sliding_layers)
        return HeadWeights(layers, config.window) if config.per_head else PassWeights(layers)

    def add(self, observer: PassWeights | HeadWeights | None) -> None:
        """Add the weights of a pass. The rows of the pass must have been committed to the cache."""
        if self._config is None or observer is None:
            return
        if record := observer.record(self._cache.length, self._config.window):
            self._passes.append(record)
