"""What the engine reports while it works: one frozen record for each thing that happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Read:
    """Progress of reading: `done` of `total` ids are in the cache."""

    done: int
    total: int


@dataclass(frozen=True)
class Evicted:
    """Rows at these stream positions left the cache; `resident` stay, of `seen` ever read."""

    positions: NDArray[np.int64]
    resident: int
    seen: int


@dataclass(frozen=True)
class Restored:
    """Rows at these stream positions came back; `resident` are held now, of `seen` ever read."""

    positions: NDArray[np.int64]
    resident: int
    seen: int


@dataclass(frozen=True)
class Generated:
    """One generated token, already in the cache; surprisal in nats, before temperature."""

    id: int
    position: int
    surprisal: float


@dataclass(frozen=True)
class Stopped:
    """Why generation ended: a stop id (which is not in the cache), the length, or an interrupt."""

    reason: Literal["stop", "length", "interrupt"]


@dataclass(frozen=True)
class Place:
    """Where in the conversation ids stand."""

    turn: int
    round: int
