"""95 % intervals of a share, of a mean, and of means over questions grouped by conversation.

Questions of one conversation are not independent, so a bootstrap sample draws whole conversations
with replacement. The random numbers are seeded: the same values give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from sirchat.lab.studies.report import Estimate

_Z = 1.959964  # 95 %


def share(right: Iterable[bool]) -> Estimate:
    """The share of true values, with Wilson's 95 % score interval; NaN if there are none."""
    answers = list(right)
    if not answers:
        return Estimate(math.nan, 0.0, 1.0)
    total, value = len(answers), sum(answers) / len(answers)
    term = _Z * _Z / total
    middle = value + term / 2
    half = _Z * math.sqrt(value * (1 - value) / total + term / (4 * total))
    low, high = (middle - half) / (1 + term), (middle + half) / (1 + term)
    return Estimate(value, max(0.0, low), min(1.0, high))


def share_over_seeds(answers: Sequence[Sequence[bool]]) -> Estimate:
    """The share of right answers, which are listed for each seed, with its 95 % interval.

    With several seeds it covers Wilson's over all answers and Student's over the seeds' shares.
    """
    pooled = share(answer for of_seed in answers for answer in of_seed)
    shares = [sum(of_seed) / len(of_seed) for of_seed in answers if of_seed]
    if len(answers) == 1 or not shares:
        return pooled
    over_seeds = mean(shares)
    low = max(0.0, min(pooled.low, over_seeds.low))
    high = min(1.0, max(pooled.high, over_seeds.high))
    return Estimate(over_seeds.value, low, high)


def mean(values: Sequence[float]) -> Estimate:
    """The mean with its 95 % interval by Student's t; infinite for fewer than two values."""
    freedom = len(values) - 1
    value = sum(values) / len(values) if values else math.nan
    if freedom < 1:
        return Estimate(value, -math.inf, math.inf)
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    quantile = _Z + first / freedom + second / freedom**2 + third / freedom**3
    quantile = {1: 12.7062, 2: 4.30265}.get(freedom, quantile)  # where the series is too short
    deviation = math.sqrt(sum((one - value) ** 2 for one in values) / freedom)
    half = quantile * deviation / math.sqrt(len(values))
    return Estimate(value, value - half, value + half)


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
