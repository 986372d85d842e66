"""Factors of a score that depend on the other held rows: novelty, and the score of the round.

One number for each row, in O(n log n) for n held rows. All in logarithms, in which no decay is too
small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows

REPEAT_FACTOR = 0.7
"""Factor on a row for each later held row of the same token."""

TOP_ROWS_PER_ROUND = 8
"""Rows of a round that count for it: with more, a long round would outweigh a short one."""

ROUND_SCORE_POWER = 2
"""Power to which the score of a row's round counts."""


def with_relative_factors(
    log_factors: dict[str, Tensor], rows: HeldRows, *, novelty: bool, spans: bool
) -> dict[str, Tensor]:
    """The logarithms [n] of factors by name, and those that depend on the other rows.

    The round's score, here called `company`, is counted without the decays.
    """
    found = dict(log_factors)
    if novelty:
        found["novelty"] = log_novelty(rows.token_id)
    if spans:
        undecayed = product_of(found) - rows.log_decay_since
        found["company"] = ROUND_SCORE_POWER * log_round_score(undecayed, rows.round)
    return found


def product_of(log_factors: dict[str, Tensor]) -> Tensor:
    """Logarithm [n] of the product of the factors; not a number counts as zero."""
    total = torch.stack([one.double() for one in log_factors.values()]).sum(0)
    return total.masked_fill(total.isnan(), -math.inf)


def log_novelty(token_id: Tensor) -> Tensor:
    """Logarithm [n] of 0.7 to the power of the number of later rows of the same token."""
    order = torch.argsort(token_id, stable=True)
    later, _ = _others(token_id[order])
    out = torch.empty(len(order), dtype=torch.float64)
    out[order] = math.log(REPEAT_FACTOR) * later.double()
    return out


def log_round_score(log_score: Tensor, round: Tensor) -> Tensor:
    """Logarithm [n] of the sum of the `BEST` highest scores in each row's round.

    Args:
        log_score: [n].
        round: [n], ascending, as rows are in stream order.
    """
    order = torch.argsort(log_score, descending=True, stable=True)
    order = order[torch.argsort(round[order], stable=True)]  # by round, the highest first
    _, before = _others(round[order])
    _, group = torch.unique_consecutive(round, return_inverse=True)
    highest = log_score[order[before == 0]]  # of each round
    highest = torch.where(highest.isinf(), 0.0, highest)
    shares = (log_score - highest[group]).exp()
    best = torch.where(before < TOP_ROWS_PER_ROUND, shares[order], 0.0)
    sums = torch.zeros(len(highest), dtype=torch.float64).index_add(0, group[order], best)
    return (highest + sums.log())[group]


def _others(sorted_keys: Tensor) -> tuple[Tensor, Tensor]:
    """In a sorted tensor [n]: how many of the same key come after each, and how many before."""
    _, group, counts = torch.unique_consecutive(
        sorted_keys, return_inverse=True, return_counts=True
    )
    starts = counts.cumsum(0) - counts
    before = torch.arange(len(sorted_keys)) - starts[group]
    return counts[group] - 1 - before, before
