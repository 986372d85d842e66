"""What several scores share: factors for words and neighbours, medians.

Scores and factors are natural logarithms [n], because products of many decays would underflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sirchat.memory.held_rows import HeldRows, Role

NEIGHBOUR_SHARE = 0.5  # least share of the score of a token beside it
MAX_WORD_TOKENS = 8  # tokens; a longer word, as in scripts without blanks, is divided


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
