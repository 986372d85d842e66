"""Policy `entropy`: the tokens that told the model most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import Held
from sirchat.memory.policies.base import ScorePolicy


@dataclass(frozen=True)
class Entropy(ScorePolicy):
    """Keeps the sinks, the tokens of highest decayed surprisal, and the `recent` newest.

    SirLLM (Yao et al. 2024, arXiv:2405.12528, section 3.3 and Algorithm 1). Its "token entropy" is
    the surprisal -log p(token | what was held), in nats; after each round every score so far is
    multiplied by `decay`. Known deviation: the paper has no recent window (`recent` 0 gives it).
    """

    source: ClassVar[str] = "SirLLM, arXiv:2405.12528"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")

    recent: int = field(default=32, metadata={"help": "newest tokens that always stay"})

    def score(self, rows: Held) -> Tensor:
        return rows.log_score.masked_fill(rows.newest(self.recent), math.inf)
