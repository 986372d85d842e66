"""Policy `snapkv`: keeps the tokens that the newest queries attend to most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Snapkv(RecentScorePolicy):
    """Keeps the sinks, the tokens that the newest queries attend to most, and the `recent` newest.

    SnapKV (Li et al. 2024, arXiv:2404.14469, section 4). The score is the sum of the attention
    weights from the newest `window` queries. Known deviations: the choice is made at each eviction;
    no pooling over neighbours; one choice for all heads and layers.
    """

    source: ClassVar[str] = "SnapKV, arXiv:2404.14469"
    needs_attention: ClassVar[bool] = True

    layers: int = field(
        default=4, metadata={"help": "number of layers whose attention counts; 0 for all"}
    )
    window: int = field(
        default=32, metadata={"help": "number of newest queries whose attention counts"}
    )

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers, max(1, self.window))

    def score(self, rows: HeldRows) -> Tensor:
        return rows.recent_attention
