"""Policy `random`: keeps a random choice of the tokens in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy
from sirchat.memory.random_numbers import Purpose, uniform


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
