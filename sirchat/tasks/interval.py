"""How sure a measured share is."""

from __future__ import annotations

import math

_Z = 1.959964  # 95 %


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval); (0, 1) when nothing was asked."""
    if not asked:
        return 0.0, 1.0
    share, spread = right / asked, _Z * _Z / asked
    middle = share + spread / 2
    half = _Z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
