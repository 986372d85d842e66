"""Policy `full`: keeps every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.errors import ContextFullError
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Keeps everything; stops with an error at the model's context length.

    The budget of this policy is the model's context length; the setting `budget` has no effect.
    """

    source: ClassVar[str] = "the model as it is"
    uses: ClassVar[tuple[str, ...]] = ()
    bounded: ClassVar[bool] = False

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Raise ContextFullError: the cache is full, and this policy never evicts."""
        raise ContextFullError(
            f"the model's context is full: {len(rows)} tokens held, and policy full evicts none",
            hint="choose another policy, such as /policy entropy, or start anew with /reset",
        )
