"""Policies that choose by the keys of tokens: `knorm` and `keydiff`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows, KeyValueStat
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Knorm(RecentScorePolicy):
    """Keeps the sinks, the tokens whose keys have the smallest norm, and the `recent` newest.

    L2 norm (Devoto et al. 2024, arXiv:2406.11430): -|k|, because a short key usually gets much
    attention; `KeyValueStore.statistics` has it. Known deviations: one choice for all heads
    and layers; the newest tokens always stay.
    """

    source: ClassVar[str] = "L2 norm, arXiv:2406.11430"

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        return ("key_norm",)

    def score(self, rows: HeldRows) -> Tensor:
        return -rows.key_norm


@dataclass(frozen=True)
class Keydiff(RecentScorePolicy):
    """Keeps the sinks, the tokens with the most distinctive keys, and the `recent` newest.

    KeyDiff (Park et al. 2025, arXiv:2504.15364). The score is the negative cosine of a key with the
    mean of all keys scaled to length 1, as attention reads them. Known deviations: one choice for
    all heads and layers; the newest tokens always stay.
    """

    source: ClassVar[str] = "KeyDiff, arXiv:2504.15364"

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        return ("key_similarity",)

    def score(self, rows: HeldRows) -> Tensor:
        return -rows.key_similarity
