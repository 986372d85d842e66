"""The base classes of eviction policies, which choose the tokens that stay in the KV cache.

A policy sees only ledger rows. Its only state are its options, the fields of its dataclass, so that
policies can be switched at any moment.
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
    """An eviction policy: chooses which tokens stay in the cache when room is needed."""

    source: ClassVar[str] = ""  # the paper that the idea is from
    # The settings that change its choice, besides its own options.
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks")
    honours_sinks: ClassVar[bool] = True  # whether sinks are protected
    honours_pins: ClassVar[bool] = True  # whether pinned rows are
    bounded: ClassVar[bool] = True  # False: it never evicts
    needs_attention: ClassVar[bool] = False  # attention statistics
    needs: ClassVar[str] = ""  # "keys": keys and values of all layers, whenever it ranks

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether `reduce` evicts after each anchor, the last token of a sentence or round."""
        return False

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        """The attention statistics that the policy uses; None for none."""
        return None

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        """The statistics of keys and values that the policy uses, computed whenever it ranks."""
        return ()

    def newest_room(self, evictable: int) -> int:
        """Most of the `evictable` rows that the newest tokens may take."""
        # Half of these are for ids that are read next, half for protected rows of the round.
        return evictable

    def reduce(self, rows: HeldRows) -> Tensor | None:
        """Numbers (int64, ascending) of the rows that stay after an anchor; None for all."""
        return None

    @abstractmethod
    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Numbers (int64, ascending) of the `num_keep` rows that stay, with all protected rows.

        `num_keep` is at least the number of protected rows and at most `len(rows)`.
        """


class ScorePolicy(Policy):
    """A policy that keeps the rows with the highest scores; of equal scores, the newest rows."""

    log_scale: ClassVar[bool] = False  # `score` is a natural log; its exponential is shown

    @abstractmethod
    def score(self, rows: HeldRows) -> Tensor:
        """The scores [n], of any float type, of the rows in stream order.

        Rows of higher score stay, and of equal scores the newer; protected rows always do.
        """

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        """Logs [n] of the factors whose product is the score, by name; `/why` shows them."""
        return {}

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        return highest(self._ranking(rows), rows.protected, num_keep)

    def _ranking(self, rows: HeldRows) -> Tensor:
        return self.score(rows)


@dataclass(frozen=True)
class RecentScorePolicy(ScorePolicy):
    """A policy with scores that ranks the `recent` newest tokens above all other tokens."""

    recent: int = field(default=32, metadata={"help": "number of newest tokens that always stay"})

    def _ranking(self, rows: HeldRows) -> Tensor:
        return self.score(rows).masked_fill(rows.newest(self.recent), math.inf)


def highest(ranking: Tensor, protected: Tensor, num_keep: int) -> Tensor:
    """Numbers (ascending) of the `num_keep` rows with the highest values `ranking` [n].

    Rows that `protected` [n] marks come first. Of equal values, the newer row wins.
    """
    newest_first = ranking.double().flip(0)
    order = torch.argsort(newest_first, descending=True, stable=True)
    order = len(ranking) - 1 - order
    is_protected = protected[order]
    best_first = torch.cat((order[is_protected], order[~is_protected]))
    return best_first[:num_keep].sort().values


def fill_nan_with_median(values: Tensor, if_none: float = 0.0) -> Tensor:
    """The values as float64; each NaN becomes the median of the others, or `if_none`."""
    usual = values.double().nanmedian().nan_to_num(if_none)
    return values.double().nan_to_num(usual.item())
