"""How likely counts are by chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sirchat.tasks.uniformity import above

Counts = Sequence[float] | NDArray[np.generic]


def chance(counts: Counts, expected: Counts | None = None) -> float:
    """Pearson's chi-squared test: the chance of counts as far from the expected ones, or farther.

    Without `expected` all are as likely. Both must have the same sum.
    """
    seen = np.asarray(counts, np.float64)
    told = np.full_like(seen, seen.mean()) if expected is None else np.asarray(expected, np.float64)
    np.testing.assert_allclose(seen.sum(), told.sum())
    return above(float(((seen - told) ** 2 / told).sum()), len(seen) - 1)


def chance_of_even(draws: NDArray[np.float64], parts: int = 50) -> float:
    """The chance that draws, uniform in [0, 1), fall as unevenly into so many parts."""
    return chance(np.histogram(draws, bins=parts, range=(0, 1))[0])
