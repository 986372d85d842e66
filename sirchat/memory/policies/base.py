"""The base classes of eviction policies, which choose the tokens that stay in the KV cache.

A policy sees only ledger rows. Its only state are its options, the fields of its dataclass, so that
policies can be switched at any moment. Of several policies are the factors of scores at the end:
natural logarithms [n], because products of many decays would underflow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows, KeyValueStat, Role

NEIGHBOUR_SHARE = 0.5  # least share of the score of a token beside it
MAX_WORD_TOKENS = 8  # tokens; a longer word, as in scripts without blanks, is divided


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


def log_product(log_factors: dict[str, Tensor]) -> Tensor:
    """The log of the product of factors by name; NaN becomes -inf."""
    total = torch.stack([factor.double() for factor in log_factors.values()]).sum(0)
    return total.masked_fill(total.isnan(), -math.inf)


def fill_nan_with_median(values: Tensor, if_none: float = 0.0) -> Tensor:
    """The values as float64; each NaN becomes the median of the others, or `if_none`."""
    usual = values.double().nanmedian().nan_to_num(if_none)
    return values.double().nan_to_num(usual.item())


def attention_or_median(received: Tensor) -> Tensor:
    """Attention received [n]; the median for a token that was read while none was recorded (0)."""
    # A recorded token has received some attention, at least from its own query.
    return fill_nan_with_median(received.masked_fill(received == 0, math.nan), if_none=1.0)


def word_factor(log_values: Tensor, rows: HeldRows) -> Tensor:
    """The factor that turns each token's value into the sum of the values of its word."""
    return log_sum_by_word(log_values, word_numbers(rows)) - log_values


def template_factor(rows: HeldRows) -> Tensor:
    """The factor 0 for tokens of the chat template, and 1 for all others."""
    return torch.where(rows.role == Role.TEMPLATE, -math.inf, 0.0)


def neighbour_factor(log_factors: dict[str, Tensor], rows: HeldRows) -> Tensor:
    """The factor that raises each token's score to at least half of each neighbour's score."""
    total = log_product(log_factors)
    is_adjacent = torch.diff(rows.position) == 1  # [n - 1]
    neighbour_share = torch.where(is_adjacent, 0.0, -math.inf) + math.log(NEIGHBOUR_SHARE)
    raised = total.clone()
    raised[1:] = torch.maximum(raised[1:], total[:-1] + neighbour_share)
    raised[:-1] = torch.maximum(raised[:-1], total[1:] + neighbour_share)
    return torch.where(total.isinf(), 0.0, raised - total)


def word_numbers(rows: HeldRows) -> Tensor:
    """The word number of each token, counted from 0; words are runs of adjacent tokens."""
    is_adjacent = torch.diff(rows.position, prepend=rows.position[:1] - 2) == 1
    starts = ~(rows.continues_word & is_adjacent)
    at = torch.arange(len(rows))
    first = torch.where(starts, at, 0).cummax(0).values
    starts |= (at - first) % MAX_WORD_TOKENS == 0
    return starts.long().cumsum(0) - 1


def log_sum_by_word(log_values: Tensor, word: Tensor) -> Tensor:
    """The log of the sum of the values of each token's word; `word` [n] are word numbers."""
    values = log_values.double()
    count = int(word[-1]) + 1 if len(word) else 0
    highest = torch.full((count,), -math.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, word, values, "amax").nan_to_num(neginf=0.0)
    sums = torch.zeros(count, dtype=torch.float64)
    sums = sums.index_add(0, word, (values - highest[word]).exp())
    return (highest + sums.log())[word]
