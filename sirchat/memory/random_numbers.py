"""Random numbers that are hashes of their purpose, position and seed, without a generator's state.

So the same conversation gets the same numbers on every device, in any order, and after a resume.
The hash is splitmix64 (Steele et al. 2014).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """The purpose of a random number. Numbers for different purposes are independent."""

    ARRIVAL = 1
    EVICTION = 2
    SAMPLING = 3


def uniform(
    seed: int, purpose: Purpose, positions: NDArray[np.int64], seen: int = 0
) -> NDArray[np.float64]:
    """A random number in [0, 1) for each of the stream `positions` [n].

    `seen` is usually the number of tokens that have been read; each value gives other numbers.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.uint64(seed) + _GAMMA * np.uint64(purpose))
        state = _mix(state ^ (np.uint64(seen) + _GAMMA))
        mixed = _mix(state ^ (positions.astype(np.uint64) * _GAMMA + _GAMMA))
    top_53_bits = mixed >> np.uint64(11)
    numbers: NDArray[np.float64] = top_53_bits.astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
