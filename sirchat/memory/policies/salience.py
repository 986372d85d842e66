"""Policy `salience`: keeps whole words of high surprisal, with the tokens beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.ledger import HeldRows, Role
from sirchat.memory.policies.base import (
    RecentScorePolicy,
    log_product,
    neighbour_factor,
    template_factor,
    word_factor,
)

_MIN_SURPRISAL = 1e-9  # nats, so that a surprisal of 0 still has a logarithm


@dataclass(frozen=True)
class Salience(RecentScorePolicy):
    """Keeps the sinks, whole words of high surprisal, tokens beside them, and the `recent` newest.

    Based on SirLLM's token entropy: a token's score is the decayed surprisal of its word
    (`whole_words`), 0 for the chat template (`template`), at least half of a neighbour's score
    (`neighbours`), and `user_weight` times as much for the user's words.
    """

    source: ClassVar[str] = "ours"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    log_scale: ClassVar[bool] = True

    whole_words: bool = field(
        default=True, metadata={"help": "give each token the total surprisal of its word"}
    )
    neighbours: bool = field(
        default=True, metadata={"help": "also keep the tokens beside a high-scoring token"}
    )
    template: bool = field(
        default=True, metadata={"help": "evict the chat template's tokens first"}
    )
    user_weight: int = field(
        default=1, metadata={"help": "factor on the scores of what the user said"}
    )

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        log_score = rows.surprisal.double().clamp_min(_MIN_SURPRISAL).log()
        factors = {"surprisal": log_score + rows.log_decay_since}
        if self.whole_words:
            factors["word"] = word_factor(log_score, rows)
        if self.template:
            factors["template"] = template_factor(rows)
        if self.user_weight != 1:
            weight = math.log(self.user_weight) if self.user_weight else -math.inf
            factors["user"] = torch.where(rows.role == Role.USER, weight, 0.0)
        if self.neighbours:
            factors["neighbours"] = neighbour_factor(factors, rows)
        return factors

    def score(self, rows: HeldRows) -> Tensor:
        return log_product(self.log_factors(rows))
