"""The base classes of eviction policies, which choose the tokens that stay in the KV cache.

A policy sees only rows of the ledger, the table with one row of facts for each token. Most policies
rank rows by a score: they define the method `score`, and the base class keeps the protected rows
and those with the highest scores. A policy's options are the fields of its dataclass. It has no
other state, so that it can be replaced by another policy at any moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import Flag, HeldRows, KeyValueStat, Ledger, Role


@dataclass(frozen=True)
class Policy(ABC):
    """An eviction policy: chooses which tokens (rows) stay in the cache when room is needed.

    Class attributes:
        source: the paper that the idea is from.
        uses: names of the settings, besides the policy's own options, that change its choice.
        honours_sinks, honours_pins: whether sinks and pinned rows are protected.
        bounded: False for a policy that never evicts.
        needs_attention: True for a policy that requires attention statistics.
        needs_scorer: True for a policy that requires the model's trained scorer.
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

        An anchor is the last token of a sequence (a sentence or round). If True, `reduce` is called
        after each anchor, and an anchor attends only to the sinks and its own sequence.
        """
        return False

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        """Which attention statistics the policy uses; None if it uses none."""
        return None

    @property
    def key_value_stats(self) -> tuple[KeyValueStat, ...]:
        """Names of the statistics of keys and values that the policy uses.

        These statistics are computed anew, which takes time, whenever the policy ranks rows.
        """
        return ()

    @property
    def repeat_layers(self) -> int | None:
        """Number of layers whose attention is recorded when a finished round is read again.

        0 means all layers; None means that the policy needs no second reading of rounds.
        """
        return None

    def newest_room(self, evictable: int) -> int:
        """Maximum number of cache rows for the newest tokens, out of `evictable` rows.

        `evictable` is the number of rows that the policy decides about: all except sinks, pins and
        the rows for recall. At most half of the returned number is used for ids that are read next,
        and at most half for the protected newest rows of the current round.
        """
        return evictable

    def reduce(self, rows: HeldRows) -> Tensor | None:
        """Choose the rows that stay after an anchor (the last token of a sequence) has been read.

        Returns the indices of these rows, int64 and ascending; all other rows are evicted. Returns
        None if all rows stay.
        """
        return None

    @abstractmethod
    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Choose the `num_keep` rows that stay in the cache; all other rows are evicted.

        Returns the numbers of the rows that stay: int64, ascending, unique, including all protected
        rows. `num_keep` is at least the number of protected rows and at most `len(rows)`.
        """


class ScorePolicy(Policy):
    """A policy that keeps the rows with the highest scores; of equal scores, the newest rows.

    Class attributes:
        log_scale: whether `score` returns natural logarithms; the user is shown their exponentials.
        unit: unit of the shown score, such as "nats"; empty for a plain number.
    """

    log_scale: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    @abstractmethod
    def score(self, rows: HeldRows) -> Tensor:
        """Compute the scores [n] of the n rows (tokens); rows with higher scores stay."""

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        """The factors whose product is each row's score; the command `/why` shows these factors.

        Returns a tensor of logarithms [n], one for each row, by the factor's name. The dictionary
        is empty if the policy's score has no factors.
        """
        return {}

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        return highest(self._ranking(rows), rows.protected, num_keep)

    def best_first(self, rows: HeldRows) -> Tensor:
        """The numbers [n] of all rows, in reverse order of eviction.

        The row that would be evicted last comes first.
        """
        return _best_first(self._ranking(rows), rows.protected)

    def _ranking(self, rows: HeldRows) -> Tensor:
        """The values [n] by which rows are ranked; of unprotected rows, the highest values stay."""
        return self.score(rows)


@dataclass(frozen=True)
class RecentScorePolicy(ScorePolicy):
    """A policy with scores that ranks the `recent` newest tokens above all other tokens."""

    recent: int = field(default=32, metadata={"help": "number of newest tokens that always stay"})

    def _ranking(self, rows: HeldRows) -> Tensor:
        return self.score(rows).masked_fill(rows.newest(self.recent), math.inf)


def highest(ranking: Tensor, protected: Tensor, num_keep: int) -> Tensor:
    """Choose the `num_keep` rows with the highest values `ranking` [n].

    Rows in the mask `protected` [n] are chosen before all other rows. Of rows with equal values,
    the newer row is chosen. Returns the numbers of the chosen rows, ascending.
    """
    kept: Tensor = _best_first(ranking, protected)[:num_keep].sort().values
    return kept


def _best_first(ranking: Tensor, protected: Tensor) -> Tensor:
    newest_first = ranking.double().flip(0)
    order = torch.argsort(newest_first, descending=True, stable=True)
    order = len(ranking) - 1 - order
    is_protected = protected[order]
    return torch.cat((order[is_protected], order[~is_protected]))


def rows_of_text(
    ids: Sequence[int],
    surprisal: Sequence[float],
    *,
    roles: Sequence[Role] = (),
    continues_word: Sequence[bool] = (),
    learned_scores: Sequence[float] = (),
    sinks: int = 4,
    seed: int = 0,
) -> HeldRows:
    """Make the table that an eviction policy sees, from a text of n tokens without a chat.

    All tokens count as held in the cache.

    Args:
        ids: token ids [n] of the text.
        surprisal: surprisal of each token, in nats; NaN for the first token, which nothing
            predicts.
        roles: who wrote each token; if empty, the user wrote all tokens.
        continues_word: whether each token belongs to the same word as the token before it.
        learned_scores: score of each token from the model's scorer, for the policy `learned`.
        sinks: how many of the first tokens are protected.
        seed: seed of the policy's random numbers.

    All statistics of attention, keys and values are 0; `dataclasses.replace` can set them.
    """
    ledger = Ledger(seed)
    ledger.append(
        list(ids),
        list(surprisal),
        turn=0,
        round=0,
        roles=[int(one) for one in roles] or [int(Role.USER)] * len(ids),
        flags=[int(Flag.CONTINUES) * bool(one) for one in continues_word] or [0] * len(ids),
        learned_scores=list(learned_scores),
    )
    ledger.rank_first_token(len(ids))
    return ledger.held(sinks=sinks, protected=np.arange(len(ids)) < sinks)
