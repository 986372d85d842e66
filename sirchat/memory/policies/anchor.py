"""Policy `anchor`: keeps the last token of each finished sequence, and the sequence being read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Anchor(ScorePolicy):
    """Keeps the sinks, the current sequence, and the last token of each before it.

    Anchor-based language models (Pang et al. 2024, arXiv:2402.07616, Algorithm 1). When a sequence
    (sentence or round) ends, only its last token, the anchor, stays; with `lazy`, for models not
    trained for anchors, once room is needed. Of too many anchors, the oldest are evicted.
    """

    source: ClassVar[str] = "Anchor-based LLMs, arXiv:2402.07616"

    lazy: bool = field(
        default=False, metadata={"help": "true: tokens are evicted only when the cache is full"}
    )

    @property
    def compacts_at_anchors(self) -> bool:
        return not self.lazy

    def reduce(self, rows: HeldRows) -> Tensor | None:
        if self.lazy:
            return None
        stays = _is_current(rows) | rows.is_anchor | rows.is_sink | rows.is_pinned
        return None if bool(stays.all()) else stays.nonzero()[:, 0]

    def score(self, rows: HeldRows) -> Tensor:
        tier = torch.where(_is_current(rows), 2, torch.where(rows.is_anchor, 1, 0))
        return tier * (rows.seen + 1) + rows.position


def _is_current(rows: HeldRows) -> Tensor:
    """Mask [n] of the tokens after the last anchor."""
    ends = rows.is_anchor.nonzero()
    last_end = int(ends[-1, 0]) if len(ends) else -1
    return torch.arange(len(rows)) > last_end
