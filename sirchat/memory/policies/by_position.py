"""Policies that choose by a token's place alone: `full`, `window`, `sink` and `interval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sirchat.errors import ContextFullError
from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import Policy, ScorePolicy


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


@dataclass(frozen=True)
class Window(ScorePolicy):
    """Keeps the most recent tokens; ignores sinks and pins.

    Sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1) as a policy. A
    baseline: once the first tokens are evicted, most models write nonsense.
    """

    source: ClassVar[str] = "Longformer's sliding window, arXiv:2004.05150"
    uses: ClassVar[tuple[str, ...]] = ("budget",)
    honours_sinks: ClassVar[bool] = False
    honours_pins: ClassVar[bool] = False

    def score(self, rows: HeldRows) -> Tensor:
        return rows.position


@dataclass(frozen=True)
class Sink(ScorePolicy):
    """Keeps the attention sinks and the most recent tokens.

    StreamingLLM (Xiao et al. 2023, arXiv:2309.17453, section 3.2). The sinks are the first
    tokens of the conversation; a token's rotary position is its slot in the cache.
    """

    source: ClassVar[str] = "StreamingLLM, arXiv:2309.17453"

    def score(self, rows: HeldRows) -> Tensor:
        return rows.position


@dataclass(frozen=True)
class Interval(Policy):
    """Keeps the sinks and, from the oldest on, every stride-th of the other held tokens.

    SirLLM's IntervalLLM baseline (arXiv:2405.12528, section 4.1). The stride is the number of
    unprotected tokens divided by how many of them stay, rounded down. If fewer than half must go,
    the stride is 1, and the oldest stay: the paper's rule, which makes the baseline weak.
    """

    source: ClassVar[str] = "SirLLM's IntervalLLM, arXiv:2405.12528"

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        stays = rows.protected.clone()
        candidates = (~stays).nonzero()[:, 0]
        room = num_keep - int(stays.sum())
        if room > 0:
            stride = max(1, len(candidates) // room)
            stays[candidates[::stride][:room]] = True
        return stays.nonzero()[:, 0]
