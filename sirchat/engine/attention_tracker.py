"""Records the attention weights that the tokens in the cache receive while ids are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, PassAttention
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Ledger
from sirchat.models.attention_hook import AttentionCall
from sirchat.models.model import LoadedModel


class PassWeights:
    """Records the attention weights of one forward pass, as a mean over heads and `layers`."""

    def __init__(self, layers: Collection[int]) -> None:
        self.layers = frozenset(layers)
        self._sum: Tensor | None = None

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self.layers:
            self.add(call.mean_weights())

    def add(self, weights: Tensor) -> None:
        self._sum = weights if self._sum is None else self._sum + weights.to(self._sum.device)

    def mean(self) -> NDArray[np.float32] | None:
        """The weights [m, n] from m queries to n cache slots; None if the model showed none."""
        if self._sum is None:
            return None
        weights: NDArray[np.float32] = (self._sum / len(self.layers)).cpu().numpy()
        return weights


class AttentionTracker:
    """Context manager: records attention weights while ids are read, in one pass or several.

    The ledger gets them when the block ends, so that they do not depend on how the ids were split.
    """

    def __init__(
        self,
        config: AttentionStatsConfig,
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
        held = self._ledger.held_positions[: self._cache.length]
        self._ledger.attention.add(held, self._passes, self._ledger.log_decay, self._config.window)

    def observer(self) -> PassWeights:
        """A new observer for the next forward pass."""
        layers = len(self._cache.row_layers)
        return PassWeights(self._config.counted_layers(layers, self._model.sliding_layers))

    def add(self, observed: PassWeights) -> None:
        """Add the attention of a pass, whose rows must have been committed to the cache."""
        weights = observed.mean()  # [m, n]
        if weights is not None:
            held = weights[:, : self._cache.length]
            self._passes.append(PassAttention.from_weights(held, self._config.window))
