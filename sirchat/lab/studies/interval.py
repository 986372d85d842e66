"""95 % confidence intervals of a share and of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959964  # 95 %


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of the share `right / total` (Wilson's score); (0, 1) for a total of 0."""
    if not total:
        return 0.0, 1.0
    share, term = right / total, _Z * _Z / total
    middle = share + term / 2
    half = _Z * math.sqrt(share * (1 - share) / total + term / (4 * total))
    return max(0.0, (middle - half) / (1 + term)), min(1.0, (middle + half) / (1 + term))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of `values` with its 95 % interval (Student's t).

    The interval is infinite for fewer than two values, and the mean of no values is NaN. The
    quantile is Abramowitz and Stegun's expansion 26.7.5, right to 0.005 from six values on.
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
