"""Policy `reservoir`: a uniform sample of everything ever read, and the most recent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Reservoir(RecentScorePolicy):
    """Keeps the sinks, a uniform sample of all tokens that left the recent window, and that window.

    Reservoir sampling for StreamingLLM (Pan et al. 2024, section 4, equations 1 and 2): its start,
    sample and recent sizes are `sinks`, `sample` and `recent`. Each token draws a key on arrival;
    the `sample` largest keys are the members, so every token of the stream has the same chance
    (Efraimidis and Spirakis 2006). Without `sample` the members fill the room there is; then the
    sample is uniform while that room does not grow. Known deviation: the paper's Figure 2 resamples
    what is in the cache, which favours new tokens; its section 4, followed here, does not.
    """

    source: ClassVar[str] = "An Experiment of Implementing Reservoir Sampling to StreamingLLM"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "seed")

    sample: int | None = field(
        default=None, metadata={"help": "members of the sample (default: all the room there is)"}
    )

    def score(self, rows: HeldRows) -> Tensor:
        if self.sample is None:
            return rows.arrival_key
        no_candidates = rows.newest(self.recent) | rows.is_sink | rows.is_pinned
        keys = rows.arrival_key.masked_fill(no_candidates, -1.0)
        members = torch.zeros(len(rows), dtype=torch.bool)
        members[keys.topk(min(self.sample, len(rows))).indices] = True
        age = (rows.seen - rows.position).double()
        return torch.where(members & (keys >= 0), 1 + keys, 1 / (1 + age))
