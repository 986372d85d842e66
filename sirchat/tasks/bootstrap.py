"""95 % intervals of means over questions that share conversations: conversations are resampled.

Questions of one conversation are not independent, so a bootstrap sample draws whole conversations
with replacement. Draws are seeded: the same values give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sirchat.tasks.report import Estimate

RESAMPLES = 2000


def clustered_mean(values_by_cluster: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, with its interval; values that are NaN do not count.

    `values_by_cluster` has the values of each conversation. The interval is infinite for fewer
    than two conversations, and the mean of no values is NaN.
    """
    clusters = [np.asarray(one, np.float64) for one in values_by_cluster]
    clusters = [one[~np.isnan(one)] for one in clusters]
    sums = np.array([one.sum() for one in clusters if len(one)])
    counts = np.array([len(one) for one in clusters if len(one)])
    if not len(sums):
        return Estimate(math.nan, -math.inf, math.inf)
    mean = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Estimate(mean, -math.inf, math.inf)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean, float(low), float(high))


def paired_interval(
    values: Sequence[Sequence[float]], others: Sequence[Sequence[float]]
) -> Estimate:
    """The mean of the differences, value less other, of the same questions by conversation."""
    return clustered_mean(
        [
            [a - b for a, b in zip(one, other, strict=True)]
            for one, other in zip(values, others, strict=True)
        ]
    )
