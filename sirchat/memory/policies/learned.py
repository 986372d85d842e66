"""Policy `learned`: keeps the tokens to which the model's trained scorer gives high scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.held_rows import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy
from sirchat.memory.policies.scores import (
    neighbour_factor,
    or_usual,
    product_of,
    template_factor,
    word_factor,
)


@dataclass(frozen=True)
class Learned(RecentScorePolicy):
    """Keeps the sinks, the tokens of the highest predicted score, and the newest.

    KVzap (Jegou and Jeblick 2026, arXiv:2601.07891): exp(w . h + b), a prediction of KVzip's score
    from the hidden states h (`models/scorer.py`). Known deviations: one score for all layers, no
    threshold; the factors `whole_words`, `template`, `neighbours`.
    """

    source: ClassVar[str] = "KVzap, arXiv:2601.07891"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    needs_scorer: ClassVar[bool] = True
    log_scale: ClassVar[bool] = True

    whole_words: bool = field(
        default=True, metadata={"help": "give each token the total score of its word"}
    )
    neighbours: bool = field(
        default=False, metadata={"help": "also keep the tokens beside a high-scoring token"}
    )
    template: bool = field(
        default=True, metadata={"help": "evict the chat template's tokens first"}
    )

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        log_score = or_usual(rows.learned_score)
        factors = {"learned score": log_score + rows.log_decay_since}
        if self.whole_words:
            factors["word"] = word_factor(log_score, rows)
        if self.template:
            factors["template"] = template_factor(rows)
        if self.neighbours:
            factors["neighbours"] = neighbour_factor(factors, rows)
        return factors

    def score(self, rows: HeldRows) -> Tensor:
        return product_of(self.log_factors(rows))
