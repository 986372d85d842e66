"""Factors of a score that depend on other held rows: the row's word, and the words beside it.

One number for each row, all in logarithms, in which no decay is too small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows

LONGEST_WORD = 8
"""Tokens that count as one word; longer runs, as in scripts without blanks, are several words."""


def product_of(log_factors: dict[str, Tensor]) -> Tensor:
    """Logarithm [n] of the product of the factors; not a number counts as zero."""
    total = torch.stack([one.double() for one in log_factors.values()]).sum(0)
    return total.masked_fill(total.isnan(), -math.inf)


def words_of(rows: HeldRows) -> Tensor:
    """The number of each row's word [n], ascending; a word is a run of adjacent tokens."""
    is_adjacent = torch.diff(rows.position, prepend=rows.position[:1] - 2) == 1
    starts = ~(rows.continues_word & is_adjacent)
    at = torch.arange(len(rows))
    first = torch.where(starts, at, 0).cummax(0).values
    starts |= (at - first) % LONGEST_WORD == 0
    return starts.long().cumsum(0) - 1


def log_sum_by_word(log_values: Tensor, word: Tensor) -> Tensor:
    """Logarithm [n] of the sum of the values [n] over the rows of each row's word [n]."""
    values = log_values.double()
    count = int(word[-1]) + 1 if len(word) else 0
    highest = torch.full((count,), -math.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, word, values, "amax").nan_to_num(neginf=0.0)
    sums = torch.zeros(count, dtype=torch.float64)
    sums = sums.index_add(0, word, (values - highest[word]).exp())
    return (highest + sums.log())[word]


def with_neighbours(log_score: Tensor, position: Tensor, share: float) -> Tensor:
    """Scores [n], or `share` of the score of the row right before or after where that is more.

    `position` [n] are ascending; only rows that are adjacent in the stream share.
    """
    is_adjacent = torch.diff(position) == 1  # [n - 1]
    lent = torch.where(is_adjacent, 0.0, -math.inf) + math.log(share)
    found = log_score.clone()
    found[1:] = torch.maximum(found[1:], log_score[:-1] + lent)
    found[:-1] = torch.maximum(found[:-1], log_score[1:] + lent)
    return found
