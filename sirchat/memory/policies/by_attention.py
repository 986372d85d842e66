"""Policies that choose by the attention that tokens receive: `h2o`, `tova` and `snapkv`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows, KeyValueStat
from sirchat.memory.policies.base import RecentScorePolicy, fill_nan_with_median


@dataclass(frozen=True)
class _AttentionPolicy(RecentScorePolicy):
    needs_attention: ClassVar[bool] = True

    layers: int = field(
        default=4, metadata={"help": "number of layers whose attention counts; 0 for all"}
    )


@dataclass(frozen=True)
class H2o(_AttentionPolicy):
    """Keeps the sinks, the tokens that received most attention so far, and the `recent` newest.

    H2O (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1). The score is the sum of the attention
    from all later queries, times the decays; with `values`, also times |v|, the L1 norm (VATP,
    arXiv:2406.12335). Known deviation: one choice for all heads and layers.
    """

    source: ClassVar[str] = "H2O, arXiv:2306.14048"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")

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
        received = _attention_or_median(rows.attention)
        if self.values:
            received = received * rows.value_norm
        return received / (rows.seen - rows.position) if self.lifetime else received


@dataclass(frozen=True)
class Tova(_AttentionPolicy):
    """Keeps the sinks, the tokens with most attention from the last query, and the `recent` newest.

    TOVA (Oren et al. 2024, arXiv:2401.06104, section 3.2). Known deviation: one choice for all
    layers.
    """

    source: ClassVar[str] = "TOVA, arXiv:2401.06104"

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers, window=1)

    def score(self, rows: HeldRows) -> Tensor:
        return rows.recent_attention


@dataclass(frozen=True)
class Snapkv(_AttentionPolicy):
    """Keeps the sinks, the tokens that the newest queries attend to most, and the `recent` newest.

    SnapKV (Li et al. 2024, arXiv:2404.14469, section 4). The score is the sum of the attention
    weights from the newest `window` queries. Known deviations: the choice is made at each eviction;
    no pooling over neighbours; one choice for all heads and layers.
    """

    source: ClassVar[str] = "SnapKV, arXiv:2404.14469"

    window: int = field(
        default=32, metadata={"help": "number of newest queries whose attention counts"}
    )

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers, max(1, self.window))

    def score(self, rows: HeldRows) -> Tensor:
        return rows.recent_attention


def _attention_or_median(received: Tensor) -> Tensor:
    """Attention received [n]; the median for a token that was read while none was recorded (0)."""
    # A recorded token has received some attention, at least from its own query.
    return fill_nan_with_median(received.masked_fill(received == 0, math.nan), if_none=1.0)
