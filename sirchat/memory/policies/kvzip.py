"""Policy `kvzip`: keeps the tokens that the model attends to when it reads a round again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.held_rows import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy
from sirchat.memory.policies.scores import (
    attention_or_usual,
    product_of,
    template_factor,
    word_factor,
)

_LEAST = 1e-9  # a weight of zero still has a logarithm


@dataclass(frozen=True)
class Kvzip(RecentScorePolicy):
    """Keeps the sinks, the tokens needed to repeat the conversation, and the newest.

    KVzip (Kim et al. 2025, arXiv:2505.23416, section 3): the highest attention weight that a token
    gets when its round is read a second time (`engine/extra_passes.py`). Known deviations: no
    prompt to repeat; the mean over heads and layers; the factors `whole_words` and `template`.
    """

    source: ClassVar[str] = "KVzip, arXiv:2505.23416"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    needs_attention: ClassVar[bool] = True
    log_scale: ClassVar[bool] = True

    layers: int = field(
        default=0, metadata={"help": "number of layers whose attention counts; 0 for all"}
    )
    whole_words: bool = field(
        default=True, metadata={"help": "give each token the total attention of its word"}
    )
    template: bool = field(
        default=True, metadata={"help": "evict the chat template's tokens first"}
    )

    @property
    def repeat_layers(self) -> int:
        return self.layers

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        log_score = attention_or_usual(rows.repeat_attention).double().clamp_min(_LEAST).log()
        factors = {"repeat attention": log_score + rows.log_decay_since}
        if self.whole_words:
            factors["word"] = word_factor(log_score, rows)
        if self.template:
            factors["template"] = template_factor(rows)
        return factors

    def score(self, rows: HeldRows) -> Tensor:
        return product_of(self.log_factors(rows))
