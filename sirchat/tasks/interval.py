"""How sure a measured share or mean is."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959964  # 95 %


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval); (0, 1) when nothing was asked."""
    if not asked:
        return 0.0, 1.0
    share, spread = right / asked, _Z * _Z / asked
    middle = share + spread / 2
    half = _Z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of `values`, NaN of none, with its 95 % interval (Student's t; infinite for one).

    The quantile is Abramowitz and Stegun's expansion 26.7.5, right to 0.005 from six values on.
    """
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
