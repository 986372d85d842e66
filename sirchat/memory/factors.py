"""What a row is worth among the others: less where its token is said again, more in company.

One number for each row, from the held rows alone, in time that grows with their number (and its
logarithm, for sorting). All in logarithms, in which no decay is too small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows

REPEATED = 0.7
"""What a row is worth for each later held row of the same token."""

BEST = 8
"""Rows of a round that speak for it: more would let a long round outweigh a telling one."""

WEIGHT = 2
"""To which power a round's company counts."""


def with_relative_factors(
    factors: dict[str, Tensor], rows: HeldRows, novelty: bool, spans: bool
) -> dict[str, Tensor]:
    """Logarithms [n] of factors by name, and those that come of the rows beside each.

    The first factor is faded by the decays; company counts it as it was before.
    """
    found = dict(factors)
    if novelty:
        found["novelty"] = log_novelty(rows.token_id)
    if spans:
        found["company"] = WEIGHT * log_company(sum_of(found) - rows.log_decay_since, rows.round)
    return found


def sum_of(factors: dict[str, Tensor]) -> Tensor:
    """Their sum [n]: the logarithm of the product; what is no number is nothing."""
    total = torch.stack([one.double() for one in factors.values()]).sum(0)
    return total.masked_fill(total.isnan(), -math.inf)


def log_novelty(token_id: Tensor) -> Tensor:
    """The logarithm of 0.7 to the number of later rows with the same token [n]."""
    order = torch.argsort(token_id, stable=True)
    later, _ = _others(token_id[order])
    out = torch.empty(len(order), dtype=torch.float64)
    out[order] = math.log(REPEATED) * later.double()
    return out


def log_company(log_decayed_surprisal: Tensor, round: Tensor) -> Tensor:
    """The logarithm of the sum of the `BEST` highest scores among the rows of each one's round.

    Of scores [n] and rounds [n], which are ascending, as rows are in stream order.
    """
    order = torch.argsort(log_decayed_surprisal, descending=True, stable=True)
    order = order[torch.argsort(round[order], stable=True)]  # by round, the highest first
    _, before = _others(round[order])
    _, group = torch.unique_consecutive(round, return_inverse=True)
    highest = log_decayed_surprisal[order[before == 0]]  # of each round
    highest = torch.where(highest.isinf(), 0.0, highest)
    shares = (log_decayed_surprisal - highest[group]).exp()
    best = torch.where(before < BEST, shares[order], 0.0)
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
