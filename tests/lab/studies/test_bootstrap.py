"""Bootstrap intervals of a mean over clusters."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import pytest

from sirchat.lab.studies.intervals import clustered_mean, hierarchical_mean, paired_interval


def clusters(spread_between: float, spread_within: float, count: int = 8) -> list[list[float]]:
    rng = Random(5)
    middles = [rng.gauss(1, spread_between) for _ in range(count)]
    return [
        [rng.gauss(at, spread_within) for _ in range(3 + n % 5)] for n, at in enumerate(middles)
    ]


def slow_interval(values: list[list[float]], resamples: int) -> tuple[float, float]:
    """The same interval, drawn one by one with another generator."""
    rng, means = Random(1), list[float]()
    for _ in range(resamples):
        drawn = [rng.choice(values) for _ in values]
        means.append(fmean([rng.choice(one) for one in drawn for _ in one]))
    means.sort()
    return means[int(0.025 * resamples)], means[int(0.975 * resamples)]


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.1), (0.1, 1.0), (1.0, 1.0)])
def test_the_interval_is_that_of_clusters_and_values_drawn_again(
    between: float, within: float
) -> None:
    values = clusters(between, within)
    found = hierarchical_mean(values)
    low, high = slow_interval(values, 8_000)
    assert found.value == pytest.approx(fmean([one for each in values for one in each]))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_drawing_only_clusters_is_drawing_both_if_the_values_of_each_agree() -> None:
    values = [[1.0] * 3, [2.0] * 5, [3.0] * 2, [4.0] * 4, [9.0] * 3]
    one, other = clustered_mean(values), hierarchical_mean(values)
    assert one.value == other.value
    assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=0.05)


def test_what_is_the_same_on_both_sides_of_a_pair_does_not_widen_the_interval() -> None:
    hard = clusters(3, 3)
    shifted = [[one + 0.5 for one in each] for each in hard]
    found = paired_interval(shifted, hard)
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_too_few_values_have_an_infinite_interval() -> None:
    one, none = hierarchical_mean([[], [2.0]]), hierarchical_mean([[]])
    assert (one.value, one.low, one.high) == (2.0, -math.inf, math.inf)
    assert math.isnan(none.value)
    assert (none.low, none.high) == (-math.inf, math.inf)
