"""Policy `salience`: surprisal, attention, novelty and rounds in one score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, or_median
from sirchat.memory.factors import product_of, with_relative_factors
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Salience(RecentScorePolicy):
    """Keeps the sinks, the tokens of highest product of the following factors, and the newest.

    Ours. Each factor can be switched off by the option of its name:

    - `surprisal`, after the decays (SirLLM): the model can't guess again what it did not predict.
      Without it, the decays alone.
    - `attention`: the square root of the attention received so far, over `layers` layers (H2O).
      Left out for the few models that do not expose their attention weights.
    - `novelty`: 0.7 to the power of the number of later held rows of the same token, so that
      phrases that are repeated do not crowd out what was said once.
    - `spans`: the square of the sum of the eight highest products in the token's round, so that
      rounds stay or go together.

    The decays reduce both surprisal and attention. Deterministic. It won on the bundled model
    `tiny` (`sirchat eval policies`); on a real model it keeps fewer of the facts told than
    `entropy` does, because `spans` assumes that small talk is surprising at one place only.
    """

    source: ClassVar[str] = "ours"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    log_scale: ClassVar[bool] = True

    surprisal: bool = field(default=True, metadata={"help": "what told the model much"})
    attention: bool = field(default=True, metadata={"help": "what was looked at"})
    novelty: bool = field(default=True, metadata={"help": "less for what was said again"})
    spans: bool = field(default=True, metadata={"help": "more for what stands in such company"})
    layers: int = field(default=4, metadata={"help": "layers whose attention counts; 0 for all"})

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        return AttentionStatsConfig(self.layers) if self.attention else None

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        found = (
            {"surprisal": rows.log_decayed_surprisal}
            if self.surprisal
            else {"decay": rows.log_decay_since}
        )
        if self.attention:
            found["attention"] = or_median(rows.attention).log() / 2
        return with_relative_factors(found, rows, novelty=self.novelty, spans=self.spans)

    def score(self, rows: HeldRows) -> Tensor:
        return product_of(self.log_factors(rows))
