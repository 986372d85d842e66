"""What a policy is: it names the held rows that stay, and sees nothing but ledger rows.

Most policies are a score: the author writes `score`, and the base class does protection, top-k and
ties. A policy's options are the fields of its dataclass. It holds no other state, so that it can be
switched at any moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows, KeyValueStat


@dataclass(frozen=True)
class Policy(ABC):
    """Chooses which held rows stay when room is needed.

    Class attributes:
        source: where the idea is from.
        uses: the shared settings that change what the policy keeps.
        honours_sinks, honours_pins: whether sinks and pinned rows are protected.
        bounded: False for a policy that never evicts.
        needs_attention: True for a policy that can't do without attention statistics.
        needs_scorer: True for a policy that can't do without the model's scorer.
    """

    source: ClassVar[str] = ""
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks")
    honours_sinks: ClassVar[bool] = True
    honours_pins: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False
    needs_scorer: ClassVar[bool] = False

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether the policy evicts rows right after each anchor is read.

        If so, text is read up to each anchor, `reduce` is called there, and the anchor itself
        attends only to the sinks and its own sequence.
        """
        return False

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        """Which attention statistics the policy uses; None for none."""
        return None

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        """Which statistics of keys and values the policy uses; they cost time at each ranking."""
        return ()

    @property
    def repeat_layers(self) -> int | None:
        """Number of layers whose attention counts when a finished round is read again; 0 for all.

        None if rounds are not read again.
        """
        return None

    def newest_room(self, evictable: int) -> int:
        """How many of the `evictable` rows, which the policy decides about, are for new tokens.

        At most half of this is for the ids read next, at most half for the round's protected rows.
        """
        return evictable

    def reduce(self, rows: HeldRows) -> Tensor | None:
        """Row numbers (int64, ascending) that stay after an anchor is read; others are evicted.

        None if all stay.
        """
        return None

    @abstractmethod
    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Row numbers [num_keep] (int64) that stay: sorted, unique, all protected rows among them.

        `num_keep` is at least the number of protected rows and at most `len(rows)`.
        """


class ScorePolicy(Policy):
    """A policy that gives each row a score: rows with higher scores stay; newer rows win ties.

    Class attributes:
        log_scale: whether `score` returns natural logarithms; the user is shown their exponentials.
        unit: unit of the shown score, such as "nats"; empty for a plain number.
    """

    log_scale: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    @abstractmethod
    def score(self, rows: HeldRows) -> Tensor:
        """One score [n] for each row."""

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        """Logarithms [n] of factors that explain the score in `/why`, by name; may be empty."""
        return {}

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        return highest(self._ranking(rows), rows.protected, num_keep)

    def _ranking(self, rows: HeldRows) -> Tensor:
        """The numbers [n] that order unprotected rows; rows with higher numbers stay."""
        return self.score(rows)


@dataclass(frozen=True)
class RecentScorePolicy(ScorePolicy):
    """A score policy that keeps the `recent` newest tokens before all others."""

    recent: int = field(default=32, metadata={"help": "number of newest tokens that always stay"})

    def _ranking(self, rows: HeldRows) -> Tensor:
        return self.score(rows).masked_fill(rows.newest(self.recent), math.inf)


def highest(ranking: Tensor, protected: Tensor, num_keep: int) -> Tensor:
    """Row numbers [num_keep], ascending, of the rows highest in `ranking` [n]; newer rows win ties.

    Rows in the mask `protected` [n] come before all others.
    """
    newest_first = ranking.double().flip(0)
    order = torch.argsort(newest_first, descending=True, stable=True)
    order = len(ranking) - 1 - order
    is_protected = protected[order]
    order = torch.cat((order[is_protected], order[~is_protected]))
    kept: Tensor = order[:num_keep].sort().values
    return kept
