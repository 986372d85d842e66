"""Factors by which policies multiply a token's score: for its age, its word, and its neighbours.

The decay is the factor for age. With `decay: auto`, the scores of older rounds are lowered when a
round is more surprising than usual. A round's surprisal is the sum of its eight highest token
surprisals, in nats, so that a long message does not count as surprising for its length alone. The
threshold is 1.5 times the mean surprisal of the sixteen rounds before the last one; with fewer than
four earlier rounds, no score is lowered. If the last round's surprisal is above the threshold, the
scores of all older rounds are multiplied by threshold / surprisal, but by no less than 0.1.
Otherwise the factor is 1, so that early facts outlive any amount of small talk.

The factors for words and neighbours are one number for each token (row) in the cache. They depend
on the scores of the tokens of the same word, or of the tokens right before and after. Scores and
these factors are logarithms, because a score is multiplied by many decays and would underflow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.ledger import HeldRows, Role

# A token's score is raised to at least this share of the scores of the tokens beside it.
NEIGHBOUR_SHARE = 0.5

# Maximum number of tokens in a word; a longer word, as in scripts without blanks, is divided.
LONGEST_WORD = 8


def product_of(log_factors: dict[str, Tensor]) -> Tensor:
    """Multiply factors of n token scores; factors and product are logarithms [n].

    `log_factors` maps names to factors. A product that is NaN becomes -inf.
    """
    total = torch.stack([one.double() for one in log_factors.values()]).sum(0)
    return total.masked_fill(total.isnan(), -math.inf)


def or_usual(log_values: Tensor) -> Tensor:
    """The values [n] as float64, with each NaN replaced by the median of the other values.

    NaN stands for an unknown value. If all values are NaN, they are replaced by 0.
    """
    return log_values.double().nan_to_num(log_values.double().nanmedian().nan_to_num().item())


def word_factor(log_values: Tensor, rows: HeldRows) -> Tensor:
    """The factor [n] that turns each token's value into the sum of the values of its whole word.

    `rows` is the table of n tokens; `log_values` [n] are the logarithms of their values. The
    factors are logarithms, too.
    """
    return log_sum_by_word(log_values, words_of(rows)) - log_values


def template_factor(rows: HeldRows) -> Tensor:
    """A factor [n] for each row: 0 for tokens of the chat template, 1 for all other tokens.

    Returns the logarithms of the factors: -inf and 0.
    """
    return torch.where(rows.role == Role.TEMPLATE, -math.inf, 0.0)


def neighbour_factor(log_factors: dict[str, Tensor], rows: HeldRows) -> Tensor:
    """The factor [n] that raises each token's score to a share of the scores of adjacent tokens.

    A token's score is the product of `log_factors`. Its raised score is at least half of the score
    of the token right before it and of the token right after it. All factors are logarithms; the
    returned factor is 1 (logarithm 0) for a token whose score is not raised.
    """
    total = product_of(log_factors)
    shared = with_neighbours(total, rows.position, NEIGHBOUR_SHARE)
    return torch.where(total.isinf(), 0.0, shared - total)


def words_of(rows: HeldRows) -> Tensor:
    """The number of the word to which each token of `rows` [n] belongs; the first word has 0.

    A word is a run of at most `LONGEST_WORD` tokens that follow each other in the conversation.
    """
    is_adjacent = torch.diff(rows.position, prepend=rows.position[:1] - 2) == 1
    starts = ~(rows.continues_word & is_adjacent)
    at = torch.arange(len(rows))
    first = torch.where(starts, at, 0).cummax(0).values
    starts |= (at - first) % LONGEST_WORD == 0
    return starts.long().cumsum(0) - 1


def log_sum_by_word(log_values: Tensor, word: Tensor) -> Tensor:
    """The sum of the values of each token's whole word, for n tokens.

    `log_values` [n] are the logarithms of the tokens' values, `word` [n] is the number of each
    token's word. Returns the logarithms [n] of the sums.
    """
    values = log_values.double()
    count = int(word[-1]) + 1 if len(word) else 0
    highest = torch.full((count,), -math.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, word, values, "amax").nan_to_num(neginf=0.0)
    sums = torch.zeros(count, dtype=torch.float64)
    sums = sums.index_add(0, word, (values - highest[word]).exp())
    return (highest + sums.log())[word]


def with_neighbours(log_score: Tensor, position: Tensor, share: float) -> Tensor:
    """Raise each token's score to at least `share` times the scores of the adjacent tokens.

    `log_score` [n] are the logarithms of the scores, and `position` [n] are the tokens' stream
    positions, ascending. Two tokens are adjacent if their positions differ by 1. Returns the
    logarithms [n] of the raised scores.
    """
    is_adjacent = torch.diff(position) == 1  # [n - 1]
    lent = torch.where(is_adjacent, 0.0, -math.inf) + math.log(share)
    found = log_score.clone()
    found[1:] = torch.maximum(found[1:], log_score[:-1] + lent)
    found[:-1] = torch.maximum(found[:-1], log_score[1:] + lent)
    return found


_MIN_ROUNDS, _MAX_ROUNDS = 4, 16  # earlier rounds that a round is compared with
_THRESHOLD = 1.5  # times the mean surprisal of these rounds
_TOP_TOKENS = 8  # tokens of a round whose surprisals are summed
_MIN_FACTOR = 0.1


def automatic_decay(surprisal: NDArray[np.float32], rounds: NDArray[np.int32]) -> float:
    """Compute the factor of `decay: auto` for the scores of all rounds before the last round.

    The factor is from 0.1 to 1, and below 1 only if the last round is unusually surprising.

    Args:
        surprisal: surprisal of each token [n], in nats.
        rounds: number of each token's round [n], rising in steps of 1; round 0 is the system
            prompt, which does not count as a round.
    """
    last = int(rounds[-1]) if len(rounds) else 0
    first = max(1, last - _MAX_ROUNDS)
    if last - first < _MIN_ROUNDS:
        return 1.0
    # numpy's own search would first copy the column, which can be a million tokens long.
    bounds = [bisect_left(rounds, one) for one in range(first, last + 2)]
    *before, now = (_round_surprisal(surprisal[start:end]) for start, end in pairwise(bounds))
    threshold = _THRESHOLD * sum(before) / len(before)
    return min(1.0, max(_MIN_FACTOR, threshold / now)) if now else 1.0


def _round_surprisal(surprisal: NDArray[np.float32]) -> float:
    known = surprisal[~np.isnan(surprisal)]
    return float(np.sort(known)[-_TOP_TOKENS:].sum())
