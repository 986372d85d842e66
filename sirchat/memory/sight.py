"""What the ids of a forward pass see, and where they stand, where that is not as usual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sight:
    """For ids [m] that are read behind a cache's n rows.

    Attributes:
        sees: bool [m, n + m], what each id sees; None for all before it, and itself.
        positions: [m], where each stands; None for slots n.. of the cache.
    """

    sees: Tensor | None = None
    positions: Sequence[int] | None = None


USUAL = Sight()
