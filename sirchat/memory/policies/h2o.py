"""Policy `h2o`: keeps the tokens that received most attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows, KeyValueStat
from sirchat.memory.policies.base import RecentScorePolicy, attention_or_median


@dataclass(frozen=True)
class H2o(RecentScorePolicy):
    """Keeps the sinks, the tokens that received most attention so far, and the `recent` newest.

    H2O (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1). The score is the sum of the attention
    from all later queries, times the decays; with `values`, also times |v|, the L1 norm (VATP,
    arXiv:2406.12335). Known deviation: one choice for all heads and layers.
    """

    source: ClassVar[str] = "H2O, arXiv:2306.14048"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    needs_attention: ClassVar[bool] = True

    layers: int = field(
        default=4, metadata={"help": "number of layers whose attention counts; 0 for all"}
    )
    lifetime: bool = field(
        default=False,
        metadata={
            "help": "divide the sum of attention by the number of queries since the token was read"
        },
    )
    values: bool = field(
        default=False, metadata={"help": "multiply the attention by the norm of the token's value"}
    )

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers)

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        return ("value_norm",) if self.values else ()

    def score(self, rows: HeldRows) -> Tensor:
        received = attention_or_median(rows.attention)
        if self.values:
            received = received * rows.value_norm
        return received / (rows.seen - rows.position) if self.lifetime else received
