"""Policy `sink`: keeps the first and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Sink(ScorePolicy):
    """Keeps the attention sinks and the most recent tokens.

    StreamingLLM (Xiao et al. 2023, arXiv:2309.17453, section 3.2). The sinks are the first
    tokens of the conversation; a token's rotary position is its slot in the cache.
    """

    source: ClassVar[str] = "StreamingLLM, arXiv:2309.17453"

    def score(self, rows: HeldRows) -> Tensor:
        return rows.position
