"""Policy `knorm`: keeps the tokens whose keys have the smallest norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows, KeyValueStat
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Knorm(RecentScorePolicy):
    """Keeps the sinks, the tokens whose keys have the smallest norm, and the `recent` newest.

    L2 norm-based compression (Devoto et al. 2024, arXiv:2406.11430): a key of low L2 norm usually
    gets much attention, so the score is -|k|. Known deviations: the paper chooses tokens for each
    head and layer; here all heads and layers keep the same tokens, by the mean score over heads and
    layers. The released code can exempt the first two layers from eviction; here tokens are evicted
    from all layers. Here the newest tokens always stay, whatever their score.
    """

    source: ClassVar[str] = "L2 norm, arXiv:2406.11430"

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        return ("key_norm",)

    def score(self, rows: HeldRows) -> Tensor:
        return -rows.key_norm
