"""Decay that goes by the conversation: what was said before fades as a round tells more than usual.

How much a round tells is the sum of its eight highest surprisals, so that a message that is merely
long does not count as telling. A round that tells more than half as much again as the rounds before
it did on average, the last sixteen of them and at least four, begins something new: scores of
before are multiplied by what the others would have to tell for that, over what it does, and by 0.1
at least. What it told itself stays as it is. Otherwise nothing fades, and what was told at the
beginning outlives any small talk.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_FEWEST, _MOST = 4, 16  # rounds before it that a round is compared with
_MORE = 1.5  # times their mean
_HIGHEST = 8  # tokens that speak for a round
_LEAST = 0.1  # is left, however much a round tells


def automatic_decay(surprisal: NDArray[np.float32], rounds: NDArray[np.int32]) -> float:
    """The factor on scores of before the last round, up to 1, where nothing fades.

    By the surprisal [n], in nats, and the round [n] of each token; rounds ascend by one, and that
    of a system prompt, 0, is none.
    """
    last = int(rounds[-1]) if len(rounds) else 0
    first = max(1, last - _MOST)
    if last - first < _FEWEST:
        return 1.0
    bounds = np.searchsorted(rounds, np.arange(first, last + 2))
    *before, now = (_told(surprisal[start:end]) for start, end in pairwise(bounds.tolist()))
    usual = _MORE * sum(before) / len(before)
    return min(1.0, max(_LEAST, usual / now)) if now else 1.0


def _told(surprisal: NDArray[np.float32]) -> float:
    known = surprisal[~np.isnan(surprisal)]
    return float(np.sort(known)[-_HIGHEST:].sum())
