"""Policy `window`: keeps only the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Window(ScorePolicy):
    """Keeps the most recent tokens; ignores sinks and pins.

    Sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1) as a policy. A
    baseline: once the first tokens are evicted, most models write nonsense.
    """

    source: ClassVar[str] = "Longformer's sliding window, arXiv:2004.05150"
    uses: ClassVar[tuple[str, ...]] = ("budget",)
    honours_sinks: ClassVar[bool] = False
    honours_pins: ClassVar[bool] = False

    def score(self, rows: HeldRows) -> Tensor:
        return rows.position
