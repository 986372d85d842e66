"""Policy `entropy`: the tokens that told the model most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.factors import sum_of, with_relative_factors
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Entropy(ScorePolicy):
    """Keeps the sinks, the tokens of highest decayed surprisal, and the `recent` newest.

    SirLLM (Yao et al. 2024, arXiv:2405.12528, section 3.3 and Algorithm 1). Its "token entropy" is
    the surprisal -log p(token | what was held), in nats; after each round every score so far is
    multiplied by `decay`. Known deviation: the paper has no recent window (`recent` 0 gives it).
    `novelty` and `spans` are not the paper's: policy `salience` says what they are.
    """

    source: ClassVar[str] = "SirLLM, arXiv:2405.12528"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")

    recent: int = field(default=32, metadata={"help": "newest tokens that always stay"})

    novelty: bool = field(default=False, metadata={"help": "less for what was said again"})
    spans: bool = field(default=False, metadata={"help": "more for what stands in such company"})

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        return with_relative_factors(
            {"surprisal": rows.log_decayed_surprisal}, rows, self.novelty, self.spans
        )

    def score(self, rows: HeldRows) -> Tensor:
        product = sum_of(self.log_factors(rows))
        return product.masked_fill(rows.newest(self.recent), math.inf)
