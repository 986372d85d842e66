"""Policies that choose by random numbers: `random` and `reservoir`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy, ScorePolicy, highest
from sirchat.memory.random_numbers import Purpose, uniform

_MIN_NEWEST = 8  # newest tokens, however large the sample is


@dataclass(frozen=True)
class Random(ScorePolicy):
    """Keeps the sinks and a random choice of the other tokens in the cache.

    SirLLM's RandomLLM baseline (arXiv:2405.12528, section 4.1): the choice is made anew at each
    eviction, so fewer of the old tokens stay; `reservoir` does not have this bias.
    """

    source: ClassVar[str] = "SirLLM's RandomLLM, arXiv:2405.12528"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "seed")

    def score(self, rows: HeldRows) -> Tensor:
        numbers = uniform(rows.seed, Purpose.EVICTION, rows.position.numpy(), rows.seen)
        return torch.from_numpy(numbers)


@dataclass(frozen=True)
class Reservoir(RecentScorePolicy):
    """Keeps the sinks, a uniform sample of all older tokens, and the `recent` newest.

    Reservoir sampling for StreamingLLM (Pan et al. 2024, section 4, equations 1 and 2): the
    `sample` older tokens with the largest arrival keys stay (Efraimidis and Spirakis 2006). Known
    deviation: in the paper's Figure 2, the sample is drawn among the held tokens.
    """

    source: ClassVar[str] = "An Experiment of Implementing Reservoir Sampling to StreamingLLM"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "seed")

    sample: int | None = field(
        default=None, metadata={"help": "number of tokens in the sample (default: as many as fit)"}
    )

    def newest_room(self, evictable: int) -> int:
        return evictable if self.sample is None else max(_MIN_NEWEST, evictable - self.sample)

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        if self.sample is None:
            return super().keep(rows, num_keep)
        fixed = int((rows.is_sink | rows.is_pinned).sum())
        window = min(self.recent, max(0, num_keep - fixed - self.sample))
        ranking = self._by_membership(rows, window, self.sample)
        ranking = ranking.masked_fill(rows.newest(window), math.inf)
        return highest(ranking, rows.protected, num_keep)

    def score(self, rows: HeldRows) -> Tensor:
        if self.sample is None:
            return rows.arrival_key
        return self._by_membership(rows, self.recent, self.sample)

    def _by_membership(self, rows: HeldRows, window: int, sample: int) -> Tensor:
        """Scores [n]: from 1 to 2 for tokens of the sample; below 1, by age, for all others."""
        no_candidates = rows.newest(window) | rows.is_sink | rows.is_pinned
        keys = rows.arrival_key.masked_fill(no_candidates, -1.0)
        members = torch.zeros(len(rows), dtype=torch.bool)
        members[keys.topk(min(sample, len(rows))).indices] = True
        age = (rows.seen - rows.position).double()
        return torch.where(members & (keys >= 0), 1 + keys, 1 / (1 + age))
