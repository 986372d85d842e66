"""How much the rows of a cache are looked at in one forward pass, layer by layer.

Where the model tells its attention weights they are taken as they are; else they are computed again
from queries and keys, for the counted layers alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer's attention in one forward pass.

    Attributes:
        layer: its number.
        queries: [1, H_q, m, D], rotated, at the end of the keys' rows.
        keys: [1, H, n, D], rotated.
        mask: as the model gives it: what is added to the scores [1, H_q or 1, m, >= n], or whether
            they count; None where each query sees all rows before it.
        options: the other arguments, such as `scaling` and `sliding_window`.
        weights: [1, H_q, m, n], where the model tells them.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    mask: Any
    options: dict[str, Any]
    weights: Tensor | None

    @property
    def scale(self) -> float:
        """Factor of the softmax."""
        return float(self.options.get("scaling") or self.queries.shape[-1] ** -0.5)


class AttentionObserver(Protocol):
    """Who listens."""

    def hear(self, one: AttentionCall) -> None:
        """Take note of what a layer did; what it is told must be copied to be kept."""


class PassWeights:
    """Hears one forward pass.

    Args:
        counting: which layers count.
        layers: how many there are.
        narrow: those of them that see only a window.
    """

    def __init__(
        self, counting: AttentionStatsConfig, layers: int, narrow: Collection[int] = ()
    ) -> None:
        self.counting = counting
        self._counted = frozenset(counting.of(layers, narrow))
        self._sum: Tensor | None = None

    def hear(self, one: AttentionCall) -> None:
        """Add what a counted layer looked at."""
        if one.layer in self._counted:
            weights = _over_heads(one)  # [m, n]
            self._sum = weights if self._sum is None else self._sum + weights.to(self._sum.device)

    def weights(self) -> NDArray[np.float32] | None:
        """From each query to each row [m, n], the mean over heads and counted layers.

        None where nothing was heard.
        """
        if self._sum is None:
            return None
        found: NDArray[np.float32] = (self._sum / len(self._counted)).cpu().numpy()
        return found


def _over_heads(one: AttentionCall) -> Tensor:
    """A layer's weights [m, n], float32, the mean over its heads."""
    if one.weights is not None and one.weights.ndim == 4:  # some tell sums of them instead
        return one.weights[0].float().mean(0)
    return attention_weights(one).mean((0, 1))


def attention_weights(one: AttentionCall) -> Tensor:
    """softmax(q k s), float32 [H, H_q / H, m, n], as the model's own attention has it.

    Each key's head serves a group of the queries' heads, one behind the other.
    """
    _, heads, rows, dims = one.keys.shape
    count = one.queries.shape[2]
    grouped = one.queries.reshape(heads, -1, dims) * one.scale  # [H, group x m, D]
    logits = (grouped @ one.keys[0].mT).float().view(heads, -1, count, rows)
    if cap := one.options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    if one.mask is not None or count > 1 or one.options.get("sliding_window"):
        logits = _masked(logits, one)
    sinks = one.options.get("s_aux")
    if sinks is None:
        return logits.softmax(-1)
    extra = sinks.float().view(heads, -1, 1, 1).expand(-1, -1, count, 1)  # gets weight, has no row
    return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]


def _masked(logits: Tensor, one: AttentionCall) -> Tensor:
    """Logits [H, group, m, n] where what a query does not see counts nothing."""
    heads, group, count, rows = logits.shape
    if isinstance(one.mask, Tensor):
        mask = one.mask[0, :, -count:, :rows]  # [H_q or 1, m, n]
        mask = mask.reshape(heads, group, count, rows) if len(mask) > 1 else mask[None]
        if mask.dtype == torch.bool:
            return logits.masked_fill(~mask, -torch.inf)
        return logits + mask.float()
    sees = torch.ones(count, rows, dtype=torch.bool, device=logits.device).tril(rows - count)
    if window := one.options.get("sliding_window"):
        sees = sees.triu(rows - count - window + 1)
    return logits.masked_fill(~sees, -torch.inf)
