"""Policy `tova`: keeps the tokens that the last query attends to most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Tova(RecentScorePolicy):
    """Keeps the sinks, the tokens with most attention from the last query, and the `recent` newest.

    TOVA (Oren et al. 2024, arXiv:2401.06104, section 3.2). Known deviation: one choice for all
    layers.
    """

    source: ClassVar[str] = "TOVA, arXiv:2401.06104"
    needs_attention: ClassVar[bool] = True

    layers: int = field(
        default=4, metadata={"help": "number of layers whose attention counts; 0 for all"}
    )

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers, window=1)

    def score(self, rows: HeldRows) -> Tensor:
        return rows.recent_attention
