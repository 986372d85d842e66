"""95 % intervals of a share, of a mean, and of means over questions grouped by conversation.

Questions of one conversation are not independent, so a bootstrap sample draws whole conversations
with replacement. The random numbers are seeded: the same values give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean

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


def share_over_seeds(answers: Sequence[Sequence[Sequence[bool]]]) -> Estimate:
    """The share of right answers, listed by seed and conversation, with its 95 % interval.

    Conversations are drawn again; or questions, if those are alike, or only one; where all answers
    are alike, it is Wilson's. With several seeds it covers Student's over the seeds' shares, too.
    """
    same = [*zip(*answers, strict=True)]  # of each conversation, the answers under each seed
    units = same if len(same) > 1 else [[one] for one in zip(*same[0], strict=True)]
    clusters = [[*chain.from_iterable(unit)] for unit in units]
    found = clustered_mean(clusters)
    if not 0 < found.value < 1:
        found = share([found.value == 1] * sum(map(bool, clusters)))
    elif not 0 <= found.low < found.high:  # all are alike, or only one has answers
        found = clustered_mean([one for unit in same for one in zip(*unit, strict=True)])
    shares = [fmean(of_seed) for each in answers if (of_seed := [*chain.from_iterable(each)])]
    if len(shares) < 2:
        return found
    over_seeds = mean(shares)
    low = max(0.0, min(found.low, over_seeds.low))
    return Estimate(found.value, low, min(1.0, max(found.high, over_seeds.high)))


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
