"""Policy `entropy`: keeps the tokens of highest surprisal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy


@dataclass(frozen=True)
class Entropy(RecentScorePolicy):
    """Keeps the sinks, the tokens of highest decayed surprisal, and the `recent` newest.

    SirLLM (Yao et al. 2024, arXiv:2405.12528, section 3.3 and Algorithm 1): its "token entropy" is
    -log p(token | held tokens), in nats, times the decays. Known deviation: there, the newest
    tokens may be evicted; `recent` 0 follows the paper.
    """

    source: ClassVar[str] = "SirLLM, arXiv:2405.12528"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    log_scale: ClassVar[bool] = True

    def score(self, rows: HeldRows) -> Tensor:
        return rows.log_decayed_surprisal
