"""95 % intervals of a share, of a mean, and of means over questions grouped by conversation.

Questions of one conversation are not independent, so a bootstrap sample draws whole conversations
with replacement. The random numbers are seeded: the same values give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sirchat.lab.studies.report import Estimate

_Z = 1.959964  # 95 %


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % score interval (low, high) of the share `right / total`.

    The interval is (0, 1) if `total` is 0.
    """
    if not total:
        return 0.0, 1.0
    share, term = right / total, _Z * _Z / total
    middle = share + term / 2
    half = _Z * math.sqrt(share * (1 - share) / total + term / (4 * total))
    return max(0.0, (middle - half) / (1 + term)), min(1.0, (middle + half) / (1 + term))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of `values` with its 95 % interval by Student's t: (mean, low, high)."""
    if not values:
        return math.nan, -math.inf, math.inf
    mean = sum(values) / len(values)
    freedom = len(values) - 1
    if freedom < 1:
        return mean, -math.inf, math.inf
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    quantile = _Z + first / freedom + second / freedom**2 + third / freedom**3
    deviation = math.sqrt(sum((one - mean) ** 2 for one in values) / freedom)
    half = quantile * deviation / math.sqrt(len(values))
    return mean, mean - half, mean + half


RESAMPLES = 2000


def clustered_mean(values_by_cluster: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, with its 95 % bootstrap interval; NaN values are left out."""
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
    """The mean of the differences `values` - `others`, with its 95 % bootstrap interval."""
    return clustered_mean(
        [
            [a - b for a, b in zip(one, other, strict=True)]
            for one, other in zip(values, others, strict=True)
        ]
    )


def hierarchical_mean(values_by_cluster: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, with its 95 % interval from the hierarchical bootstrap."""
    clusters = [np.asarray(one, np.float64) for one in values_by_cluster if len(one)]
    values = np.concatenate(clusters) if clusters else np.empty(0)
    if len(values) < 2:
        return Estimate(float(values[0]) if len(values) else math.nan, -math.inf, math.inf)
    low, high = np.quantile(_hierarchical_sample_means(clusters), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


def _hierarchical_sample_means(clusters: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The means [RESAMPLES] of all samples of the hierarchical bootstrap."""
    rng = np.random.default_rng(0)
    sums, counts = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for drawn in rng.integers(len(clusters), size=(len(clusters), RESAMPLES)):
        for number, values in enumerate(clusters):
            of_this = np.flatnonzero(drawn == number)
            sums[of_this] += rng.choice(values, (len(of_this), len(values))).sum(1)
            counts[of_this] += len(values)
    means: NDArray[np.float64] = sums / counts
    return means
