"""Policies that choose by the surprisal of tokens: `entropy` and `salience`.

Scores and their factors are natural logarithms [n], as products of many decays would underflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows, Role
from sirchat.memory.policies.base import RecentScorePolicy

_MIN_SURPRISAL = 1e-9  # nats, so that a surprisal of 0 still has a logarithm
_NEIGHBOUR_SHARE = 0.5  # least share of the score of a token beside it
_MAX_WORD_TOKENS = 8  # tokens; a longer word, as in scripts without blanks, is divided


@dataclass(frozen=True)
class Entropy(RecentScorePolicy):
    """Keeps the sinks, the tokens of highest decayed surprisal, and the `recent` newest.

    SirLLM (Yao et al. 2024, arXiv:2405.12528, section 3.3 and Algorithm 1): its "token entropy" is
    -log p(token | held tokens), in nats, times the decays. Known deviation: there, the newest
    tokens may be evicted; `recent` 0 follows the paper.
    """

    source: ClassVar[str] = "SirLLM, arXiv:2405.12528"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    log_scale: ClassVar[bool] = True

    def score(self, rows: HeldRows) -> Tensor:
        return rows.log_decayed_surprisal


@dataclass(frozen=True)
class Salience(RecentScorePolicy):
    """Keeps the sinks, whole words of high surprisal, tokens beside them, and the `recent` newest.

    Based on SirLLM's token entropy: a token's score is the decayed surprisal of its word
    (`whole_words`), 0 for the chat template (`template`), at least half of a neighbour's score
    (`neighbours`), and `user_weight` times as much for the user's words.
    """

    source: ClassVar[str] = "ours"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    log_scale: ClassVar[bool] = True

    whole_words: bool = field(
        default=True, metadata={"help": "give each token the total surprisal of its word"}
    )
    neighbours: bool = field(
        default=True, metadata={"help": "also keep the tokens beside a high-scoring token"}
    )
    template: bool = field(
        default=True, metadata={"help": "evict the chat template's tokens first"}
    )
    user_weight: int = field(
        default=1, metadata={"help": "factor on the scores of what the user said"}
    )

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        log_score = rows.surprisal.double().clamp_min(_MIN_SURPRISAL).log()
        factors = {"surprisal": log_score + rows.log_decay_since}
        if self.whole_words:
            factors["word"] = _log_word_sums(log_score, rows) - log_score
        if self.template:
            factors["template"] = torch.where(rows.role == Role.TEMPLATE, -math.inf, 0.0)
        if self.user_weight != 1:
            weight = math.log(self.user_weight) if self.user_weight else -math.inf
            factors["user"] = torch.where(rows.role == Role.USER, weight, 0.0)
        if self.neighbours:
            factors["neighbours"] = _neighbour_factor(factors, rows)
        return factors

    def score(self, rows: HeldRows) -> Tensor:
        return _log_product(self.log_factors(rows))


def _neighbour_factor(log_factors: dict[str, Tensor], rows: HeldRows) -> Tensor:
    """The factor that raises each token's score to at least half of each neighbour's score."""
    total = _log_product(log_factors)
    is_adjacent = torch.diff(rows.position) == 1  # [n - 1]
    neighbour_share = torch.where(is_adjacent, 0.0, -math.inf) + math.log(_NEIGHBOUR_SHARE)
    raised = total.clone()
    raised[1:] = torch.maximum(raised[1:], total[:-1] + neighbour_share)
    raised[:-1] = torch.maximum(raised[:-1], total[1:] + neighbour_share)
    return torch.where(total.isinf(), 0.0, raised - total)


def _word_numbers(rows: HeldRows) -> Tensor:
    """The word number of each token, counted from 0; words are runs of adjacent tokens."""
    is_adjacent = torch.diff(rows.position, prepend=rows.position[:1] - 2) == 1
    starts = ~(rows.continues_word & is_adjacent)
    at = torch.arange(len(rows))
    first = torch.where(starts, at, 0).cummax(0).values
    starts |= (at - first) % _MAX_WORD_TOKENS == 0
    return starts.long().cumsum(0) - 1


def _log_word_sums(log_values: Tensor, rows: HeldRows) -> Tensor:
    """The log [n] of the sum of the values of each token's word."""
    values, word = log_values.double(), _word_numbers(rows)
    count = int(word[-1]) + 1 if len(word) else 0
    highest = torch.full((count,), -math.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, word, values, "amax").nan_to_num(neginf=0.0)
    sums = torch.zeros(count, dtype=torch.float64)
    sums = sums.index_add(0, word, (values - highest[word]).exp())
    return (highest + sums.log())[word]


def _log_product(log_factors: dict[str, Tensor]) -> Tensor:
    """The log of the product of factors by name; NaN becomes -inf."""
    total = torch.stack([factor.double() for factor in log_factors.values()]).sum(0)
    return total.masked_fill(total.isnan(), -math.inf)
