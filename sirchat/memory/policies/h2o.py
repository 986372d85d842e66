"""Policy `h2o`: keeps the tokens that received most attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, or_median
from sirchat.memory.ledger import HeldRows, KeyValueStat
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class H2o(RecentScorePolicy):
    """Keeps the sinks, the tokens that received most attention so far, and the `recent` newest.

    H2O (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1): the score is the sum of the attention
    weights from all queries since the token was read. After each round, the sum is multiplied by
    the setting `decay`. The option `lifetime` divides the sum by the number of these queries, so
    that a token's age alone does not raise its score. The option `values` multiplies the sum by
    |v|, the L1 norm of the token's value (VATP, Guo et al. 2024, arXiv:2406.12335: "H2O w/ VATP").
    Known deviation: the paper chooses tokens for each head and layer; here all heads and layers
    keep the same tokens. A token's score is the mean over heads and over `layers` evenly spaced
    layers; |v| is the mean over all heads and layers.
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
        received = or_median(rows.attention)
        if self.values:
            received = received * rows.value_norm
        return received / (rows.seen - rows.position) if self.lifetime else received
