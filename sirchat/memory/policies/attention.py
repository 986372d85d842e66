"""Policy `attention`: the tokens that were looked at most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, or_median
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Attention(ScorePolicy):
    """Keeps the sinks, the tokens that received most attention, and the `recent` newest.

    H2O (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1): the sum of the attention weights that a
    token got from all queries so far; after each round every sum is multiplied by `decay`. With
    `window` 1 the last query alone decides: TOVA (Oren et al. 2024, arXiv:2401.06104); with 32, an
    observation window as in SnapKV (Li et al. 2024, arXiv:2404.14469). `lifetime` divides a sum by
    the queries since the token was read, so that age alone earns nothing. Known deviations: one
    choice of tokens serves all heads and layers, by the mean over heads and over `layers` evenly
    spaced layers; a window is that of the queries before each eviction, whoever speaks, and
    SnapKV's pooling over neighbours is left out.
    """

    source: ClassVar[str] = "H2O, TOVA, SnapKV: arXiv:2306.14048, 2401.06104, 2404.14469"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    needs_attention: ClassVar[bool] = True

    recent: int = field(default=32, metadata={"help": "newest tokens that always stay"})
    layers: int = field(default=4, metadata={"help": "layers that are counted; 0 for all"})
    window: int = field(default=0, metadata={"help": "newest queries that count, unfaded; 0: all"})
    lifetime: bool = field(default=False, metadata={"help": "divide by the queries since, if all"})

    @property
    def unused(self) -> tuple[str, ...]:
        return ("decay",) if self.window else ()

    @property
    def counting(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers, self.window)

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        received = rows.recent_attention if self.window else or_median(rows.attention)
        if self.lifetime and not self.window:
            received = received / (rows.seen - rows.position)
        return {"attention": received.log()}

    def score(self, rows: HeldRows) -> Tensor:
        (received,) = self.log_factors(rows).values()
        return received.masked_fill(rows.newest(self.recent), math.inf)
