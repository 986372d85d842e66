"""Policy `anchor`: the ends of finished sentences, and the sentence under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import Held
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Anchor(ScorePolicy):
    """Keeps the sinks, the current sentence, then sentence ends, newest first, then the rest.

    The endpoint variant of anchor-based language models (Pang et al. 2024, arXiv:2402.07616,
    section 3.2): the token that ends a sentence stands for all of it. Known deviation: the model
    was not trained to gather a sentence in its last token, and rows leave only when room is needed.
    """

    source: ClassVar[str] = "Anchor-based LLMs (endpoint variant), arXiv:2402.07616"

    def score(self, rows: Held) -> Tensor:
        ends = rows.is_anchor.nonzero()
        last_end = int(ends[-1, 0]) if len(ends) else -1
        current = torch.arange(len(rows)) > last_end
        tier = torch.where(current, 2, torch.where(rows.is_anchor, 1, 0))
        return tier * (rows.seen + 1) + rows.position
