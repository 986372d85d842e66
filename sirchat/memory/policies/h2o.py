"""Policy `h2o`: the tokens that received most attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, or_median
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class H2o(RecentScorePolicy):
    """Keeps the sinks, the tokens that received most attention so far, and the `recent` newest.

    H2O (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1): the score is the sum of the attention
    weights from all queries since the token was read; after each round it is multiplied by `decay`.
    `lifetime` divides the sum by the number of these queries, so that age alone earns nothing.
    Known deviation: one choice of tokens serves all heads and layers, by the mean over heads and
    over `layers` evenly spaced layers.
    """

    source: ClassVar[str] = "H2O, arXiv:2306.14048"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    needs_attention: ClassVar[bool] = True

    layers: int = field(default=4, metadata={"help": "layers that are counted; 0 for all"})
    lifetime: bool = field(default=False, metadata={"help": "divide by the queries since"})

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers)

    def score(self, rows: HeldRows) -> Tensor:
        received = or_median(rows.attention)
        return received / (rows.seen - rows.position) if self.lifetime else received
