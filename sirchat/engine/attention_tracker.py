"""Records the attention weights that the tokens in the cache receive while ids are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, PassAttention
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Ledger
from sirchat.models.attention_hook import AttentionCall


class AttendingModel(Protocol):
    """Protocol: the properties of a model that `AttentionTracker` needs."""

    @property
    def heads(self) -> int:
        """Number of query heads per layer."""

    @property
    def sliding_layers(self) -> Collection[int]:
        """Numbers of the layers with sliding-window attention."""


class PassWeights:
    """Records the attention weights of one forward pass, as a mean over heads and some layers.

    Args:
        layers: numbers of the layers whose weights are averaged.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = frozenset(layers)
        self._sum: Tensor | None = None

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._layers:
            weights = call.mean_weights()  # [m, n]
            self._sum = weights if self._sum is None else self._sum + weights.to(self._sum.device)

    def mean(self) -> NDArray[np.float32] | None:
        """The attention weights [m, n] from the pass's m queries to n cache rows.

        They are the mean over heads and observed layers. Returns None if the model has exposed no
        attention weights of these layers.
        """
        if self._sum is None:
            return None
        found: NDArray[np.float32] = (self._sum / len(self._layers)).cpu().numpy()
        return found


class HighestWeights:
    """Records the highest attention weight that each of k cache rows receives in a forward pass.

    Args:
        layers: numbers of the layers that are observed; the result is the mean over these layers
            and all heads.
        slots: cache slots [k] of the rows.
    """

    def __init__(self, layers: Collection[int], slots: Tensor) -> None:
        self._layers, self._slots = frozenset(layers), slots
        self._sum: Tensor | None = None

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._layers:
            weights = call.weights()[:, :, self._slots.to(call.keys.device)]  # [H_q, m, k]
            highest = weights.amax(1).mean(0).cpu()
            self._sum = highest if self._sum is None else self._sum + highest

    def mean(self) -> NDArray[np.float64] | None:
        """For each of the k rows, the highest attention weight that it received in a layer [k].

        It is the mean over the observed layers. Returns None if the model has exposed no
        attention weights of these layers.
        """
        return None if self._sum is None else (self._sum / len(self._layers)).double().numpy()


class AttentionTracker:
    """Context manager: records attention weights while token ids are read.

    The ids may be read in one forward pass or in several. The ledger's attention statistics are
    updated once, when the `with` block ends, so that the result does not depend on how the ids
    were split into passes.

    Args:
        config: which attention weights are recorded; None to record none.
        model: the model that reads the ids.
        cache, ledger: the KV cache and the table of tokens to which the ids are added.
    """

    def __init__(
        self,
        config: AttentionStatsConfig | None,
        model: AttendingModel,
        cache: BoundedCache,
        ledger: Ledger,
    ) -> None:
        self._config, self._model = config, model
        self._cache, self._ledger = cache, ledger
        self._passes: list[PassAttention] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._config is not None:
            ledger = self._ledger
            held = ledger.held_positions[: self._shared_rows]
            ledger.attention.add(held, self._passes, ledger.log_decay, self._config.window)

    @property
    def _shared_rows(self) -> int:
        """Number of cache rows that hold the same token in all layers.

        The cache's other rows were inserted by recall, for each layer separately.
        """
        return self._cache.length - self._cache.inserted_count

    def rows_within(self, count: int, size: int) -> int:
        """How many of the next `count` ids one forward pass may read; at least 1.

        The limit is that the attention weights of one layer take at most `size` bytes. Returns
        `count` if no attention is recorded.
        """
        if self._config is None:
            return count
        rows = self._cache.length + count
        return max(1, min(count, size // (4 * self._model.heads * rows)))

    def observer(self) -> PassWeights | None:
        """A new observer of attention weights for the next forward pass.

        Returns None if no attention is recorded.
        """
        if self._config is None:
            return None
        count, sliding = len(self._cache.row_layers), self._model.sliding_layers
        return PassWeights(self._config.counted_layers(count, sliding))

    def add(self, observed: PassWeights | None) -> None:
        """Add the attention weights of a forward pass to those that this tracker has recorded.

        Call this after the pass's rows are committed to the cache. `observed` is the observer of
        the pass; nothing is added if it is None.
        """
        weights = observed.mean() if observed is not None else None  # [m, n]
        if self._config is not None and weights is not None:
            shared = self._cache.slots_of(torch.arange(self._shared_rows)).numpy()
            passed = PassAttention.from_weights(weights[:, shared], self._config.window)
            self._passes.append(passed)
