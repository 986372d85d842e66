"""Policy `salience`: what told much, was looked at, is new, and stands in such company."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig, or_median
from sirchat.memory.factors import sum_of, with_relative_factors
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Salience(ScorePolicy):
    """Keeps the sinks, the most salient tokens, and the `recent` newest.

    Ours. Each factor mends what the one before gets wrong:

    - `surprisal`, after the decays: what the model could not have foretold it can't guess again
      (SirLLM). But it is high wherever a message begins, too, whatever is said there.
    - `attention`, the square root of what was received so far, over `layers` layers: what later
      tokens needed they may need again (H2O). By itself it prefers what is old, and punctuation.
      It is left out for the few models that don't let it be heard.
    - `novelty`, 0.7 to the number of later held rows of the same token: phrases that come again and
      again would crowd out what was said once.
    - `spans`: times the square of the sum of the eight highest such products in its round. A fact
      is surprising at several places and of use only whole, while small talk surprises at one; so
      rounds stay or go together.

    The decays fade surprisal and attention, and attention fades company: so a round that is never
    looked at again is forgotten sooner than one that is. Deterministic. Measured with the bundled
    model in `sirchat eval policies` (README, "Studies").
    """

    source: ClassVar[str] = "ours"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")

    recent: int = field(default=32, metadata={"help": "newest tokens that always stay"})
    surprisal: bool = field(default=True, metadata={"help": "what told the model much"})
    attention: bool = field(default=True, metadata={"help": "what was looked at"})
    novelty: bool = field(default=True, metadata={"help": "less for what was said again"})
    spans: bool = field(default=True, metadata={"help": "more for what stands in such company"})
    layers: int = field(default=4, metadata={"help": "layers whose attention counts; 0 for all"})

    @property
    def counting(self) -> AttentionStatsConfig | None:
        return AttentionStatsConfig(self.layers) if self.attention else None

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        found = (
            {"surprisal": rows.log_decayed_surprisal}
            if self.surprisal
            else {"fade": rows.log_decay_since}
        )
        if self.attention:
            found["attention"] = or_median(rows.attention).log() / 2
        return with_relative_factors(found, rows, self.novelty, self.spans)

    def score(self, rows: HeldRows) -> Tensor:
        product = sum_of(self.log_factors(rows))
        return product.masked_fill(rows.newest(self.recent), math.inf)
