"""Policy `vase`: keeps the tokens of the widest values, and a draw of the others by attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.held_rows import HeldRows, KeyValueStat
from sirchat.memory.policies.base import RecentScorePolicy, highest
from sirchat.memory.random_numbers import Purpose, uniform

_POOL = 5  # adjacent tokens over which the attention is averaged


@dataclass(frozen=True)
class Vase(RecentScorePolicy):
    """Keeps the sinks, the tokens of widest value range, a random sample, and the `recent` newest.

    VaSE-AttnV (Chang et al. 2026, arXiv:2606.03928): `large` percent of the room go to the largest
    max(v) - min(v), the rest to a draw by log(u) / w, u uniform and w the attention from the newest
    `window` queries (Efraimidis and Spirakis 2006). Known deviation: one choice for all heads.
    """

    source: ClassVar[str] = "VaSE, arXiv:2606.03928"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "seed")
    needs_attention: ClassVar[bool] = True
    log_scale: ClassVar[bool] = True

    large: int = field(
        default=25,
        metadata={"help": "percentage of the room that tokens with the widest values get"},
    )
    layers: int = field(
        default=4, metadata={"help": "number of layers whose attention counts; 0 for all"}
    )
    window: int = field(
        default=64, metadata={"help": "number of newest queries whose attention counts"}
    )

    @property
    def attention_stats(self) -> AttentionStatsConfig:
        return AttentionStatsConfig(self.layers, max(1, self.window))

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        return ("value_range",)

    def score(self, rows: HeldRows) -> Tensor:
        side = _POOL // 2
        pooled = torch.nn.functional.avg_pool1d(rows.recent_attention[None], _POOL, 1, side)[0]
        weight = pooled / pooled.mean().clamp_min(1e-12) + 1e-12  # without attention: all equal
        numbers = uniform(rows.seed, Purpose.EVICTION, rows.position.numpy(), rows.seen)
        return torch.from_numpy(numbers).log() / weight

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        fixed = rows.protected | rows.newest(self.recent)
        room = max(0, num_keep - int(fixed.sum()))
        others = rows.value_range.masked_fill(fixed, -math.inf)
        widest = highest(others, torch.zeros_like(fixed), room * min(100, self.large) // 100)
        ranking = self.score(rows).masked_fill(fixed, math.inf)
        ranking[widest] = math.inf
        return highest(ranking, rows.protected, num_keep)
