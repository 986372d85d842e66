"""Policy `interval`: keeps every n-th of the tokens in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import Policy


@dataclass(frozen=True)
class Interval(Policy):
    """Keeps the sinks and, from the oldest on, every stride-th of the other held tokens.

    SirLLM's IntervalLLM baseline (arXiv:2405.12528, section 4.1). The stride is the number of
    unprotected tokens divided by how many of them stay, rounded down. If fewer than half must go,
    the stride is 1, and the oldest stay: the paper's rule, which makes the baseline weak.
    """

    source: ClassVar[str] = "SirLLM's IntervalLLM, arXiv:2405.12528"

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        stays = rows.protected.clone()
        candidates = (~stays).nonzero()[:, 0]
        room = num_keep - int(stays.sum())
        if room > 0:
            stride = max(1, len(candidates) // room)
            stays[candidates[::stride][:room]] = True
        return stays.nonzero()[:, 0]
