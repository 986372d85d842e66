"""What a policy is: it names the held rows that stay, and sees nothing but ledger rows.

Most policies are a score: the author writes `score`, the base class owns protection, top-k and
ties. A policy's options are the fields of its dataclass; it holds no other state, so that it can be
switched at any moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.ledger import HeldRows


@dataclass(frozen=True)
class Policy(ABC):
    """Chooses which held rows stay when room is needed.

    Class attributes: `source` names where the idea is from; `uses` the shared settings that change
    what it keeps; `honours_sinks` and `honours_pins` say whether these rows are protected;
    `bounded` is false for a policy that never forgets; `needs_attention` is true for one that is
    nothing without what it has counted.

    `gathers` is true for a policy that counts on anchors: what is read is cut behind each of them,
    `reduce` is asked there, and an anchor sees the sinks and its own sequence alone.
    """

    source: ClassVar[str] = ""
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks")
    honours_sinks: ClassVar[bool] = True
    honours_pins: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether sequences are gathered in their anchors."""
        return False

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings of `uses` that its options leave nothing to change."""
        return ()

    @property
    def counting(self) -> AttentionStatsConfig | None:
        """What it wants counted of the attention that rows get; None for nothing."""
        return None

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        """Logarithms of what a row is ranked by the product of, by name, [n] each; may be empty.

        Two names mean what the ledger knows, and are shown as that: `surprisal` is the decayed one,
        `log_score`, and `fade` the decays alone, `log_fade`.
        """
        return {}

    def reduce(self, rows: HeldRows) -> Tensor | None:
        """Row numbers (int64) that stay though there is room for more, as `keep` gives them.

        None where all stay.
        """
        return None

    @abstractmethod
    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Row numbers [num_keep] (int64) that stay: sorted, unique, all protected rows among them.

        `num_keep` is at least the number of protected rows and at most `len(rows)`.
        """


class ScorePolicy(Policy):
    """A policy that is one number per row: higher stays; of equals, the newer."""

    @abstractmethod
    def score(self, rows: HeldRows) -> Tensor:
        """One score [n] for each held row."""

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        newest_first = self.score(rows).double().flip(0)
        order = torch.argsort(newest_first, descending=True, stable=True)
        order = len(rows) - 1 - order
        protected = rows.protected[order]
        order = torch.cat((order[protected], order[~protected]))
        kept: Tensor = order[:num_keep].sort().values
        return kept
