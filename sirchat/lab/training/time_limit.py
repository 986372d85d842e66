"""A training that ends after a number of steps or of minutes, and the learning rate until then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import distributed

Schedule = Literal["constant", "cosine"]

ENDLESS = 1_000_000
"""Steps of a training that only time ends."""


class TrainingClock:
    """Seconds of training, those before it was resumed included.

    Args:
        limit: seconds that the training may take; None for any number.
        before: the time at the end of each step of earlier runs.
        now: the time in seconds.
    """

    def __init__(
        self,
        limit: float | None = None,
        before: Sequence[float] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit, self._now = limit, now
        *_, second_last, self.seconds = (0.0, 0.0, *before)
        self._last_step = self.seconds - second_last
        self.start()

    def start(self) -> None:
        """Begin to count, from the end of the last step."""
        self._start = self._now() - self.seconds

    def finish_step(self, device: torch.device | None = None) -> None:
        """Read the time at the end of a step; processes that train together read the first's.

        `device` is that of this process.
        """
        seconds = self._now() - self._start
        if distributed.is_available() and distributed.is_initialized():
            shared = torch.tensor(seconds, dtype=torch.float32, device=device)
            distributed.broadcast(shared, src=0)
            seconds = shared.item()
        self._last_step, self.seconds = seconds - self.seconds, seconds

    @property
    def share(self) -> float:
        """The share of the time that has passed, 0 to 1; 0 without a limit."""
        return 0.0 if self._limit is None else min(1.0, self.seconds / self._limit)

    @property
    def is_over(self) -> bool:
        """Whether the time is over, or would be after another step as long as the last one."""
        return self._limit is not None and self.seconds + self._last_step >= self._limit


def learning_rate(
    step: int, steps: int, warmup: int, schedule: Schedule, share: float = 0.0
) -> float:
    """The factor on the learning rate of step `step` (from 0): linear warm-up, then `schedule`.

    `cosine` falls to 0 at the end of `steps`, or of the time, of which `share` has passed.
    """
    rising = min(1.0, step / warmup) if warmup else 1.0
    if schedule == "constant":
        return rising
    passed = max(share, (step - warmup) / max(1, steps - warmup))
    return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, passed))))
