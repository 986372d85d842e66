"""Automatic decay (`decay: auto`): older scores fade when a round is more surprising than usual.

A round's surprisal is the sum of its eight highest token surprisals, in nats, so that a long
message does not count as surprising for its length alone. It is compared with 1.5 times the mean
over the rounds before it (the last sixteen; with fewer than four, nothing fades). Above that, the
scores of all older rounds are multiplied by the threshold over the round's surprisal, but by no
less than 0.1. Otherwise the factor is 1, so that early facts outlive any amount of small talk.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_MIN_ROUNDS, _MAX_ROUNDS = 4, 16  # earlier rounds that a round is compared with
_THRESHOLD = 1.5  # times their mean
_TOP_TOKENS = 8  # of a round, whose surprisals are summed
_MIN_FACTOR = 0.1


def automatic_decay(surprisal: NDArray[np.float32], rounds: NDArray[np.int32]) -> float:
    """The factor, at most 1, on the scores of all tokens older than the last round.

    Args:
        surprisal: of each token [n], in nats.
        rounds: the round of each token [n], ascending by one; round 0 is the system prompt, which
            is not counted as a round.
    """
    last = int(rounds[-1]) if len(rounds) else 0
    first = max(1, last - _MAX_ROUNDS)
    if last - first < _MIN_ROUNDS:
        return 1.0
    # numpy's own search would first copy the column, which is a million tokens long at some time.
    bounds = [bisect_left(rounds, one) for one in range(first, last + 2)]
    *before, now = (_round_surprisal(surprisal[start:end]) for start, end in pairwise(bounds))
    threshold = _THRESHOLD * sum(before) / len(before)
    return min(1.0, max(_MIN_FACTOR, threshold / now)) if now else 1.0


def _round_surprisal(surprisal: NDArray[np.float32]) -> float:
    known = surprisal[~np.isnan(surprisal)]
    return float(np.sort(known)[-_TOP_TOKENS:].sum())
