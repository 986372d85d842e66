"""Chooses the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.key_values import to_device
from sirchat.memory.random_numbers import Purpose, uniform

# Limits a reply to a format: from the reply's ids so far to a mask, bool [V], on the CPU, of those
# that may follow; or float32 [V], which is added to the logits.
TokenFilter = Callable[[Sequence[int]], Tensor]

_FAR = 80.0  # an id with a score so much below the largest is never drawn


@dataclass(frozen=True)
class Sampling:
    """Parameters for sampling the next token; temperature 0 always takes the most likely one."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int = 0

    @property
    def narrows(self) -> bool:
        """Whether top-k, top-p or min-p leave out any ids."""
        return bool(self.top_k or self.min_p or (self.top_p or 1.0) < 1.0)


class Sampler:
    """Picks each next token of a reply; each `attempt` at it gets different random numbers."""

    def __init__(
        self, sampling: Sampling, attempt: int = 0, allowed: TokenFilter | None = None
    ) -> None:
        self.sampling, self.attempt = sampling, attempt
        self._allowed = allowed
        self._picked: list[int] = []

    @property
    def is_plain(self) -> bool:
        """Whether `sampling` alone says which ids are picked: none are given, or not allowed."""
        return self._allowed is None

    @property
    def is_greedy(self) -> bool:
        """Whether the id of the largest logit is picked each time."""
        if not self.is_plain:
            return False
        return self.sampling.temperature == 0 and self.sampling.repetition_penalty == 1

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        """The next token's id, from its raw logits [V] and its stream position.

        `said_ids(n)` returns the newest n held ids, for the repetition penalty. Raises ModelError
        if the logits are NaN, or if no id is allowed to follow.
        """
        if self._allowed is None:
            return self._choose(logits, said_ids, position)
        limits = self._allowed(self._picked)
        is_mask = limits.dtype == torch.bool
        if not (limits if is_mask else limits > -math.inf).any():
            raise ModelError("no token may follow in the format of this reply")
        (by,) = to_device([~limits if is_mask else limits], logits.device)
        allowed = logits.masked_fill(by, -math.inf) if is_mask else logits.float() + by
        self._picked.append(self._choose(allowed, said_ids, position))
        return self._picked[-1]

    def _choose(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        sampling, scores = self.sampling, logits
        if sampling.repetition_penalty != 1.0:
            said = torch.tensor(said_ids(sampling.repetition_window), dtype=torch.int64)
            said = to_device([said], scores.device)[0]
            scores = apply_repetition_penalty(scores.float(), said, sampling.repetition_penalty)
        if sampling.temperature == 0.0:
            best = scores.max(-1)  # NaN counts as the largest
            chosen = int(torch.where(best.values.isnan(), -1, best.indices))  # the only wait
        else:
            chosen = self._draw(scores, position)
        if chosen < 0:
            raise ModelError(
                "the model's scores for the next token are not numbers",
                hint="its weights, or a saved chat's keys, may be damaged; or try --dtype float32",
            )
        return chosen

    def _draw(self, scores: Tensor, position: int) -> int:
        """An id, drawn by raw scores [V]; -1 if they are no numbers."""
        sampling = self.sampling
        # On the CPU: not every device has float64, or sums in the same order each time.
        scaled = (scores.float() / sampling.temperature).cpu().numpy()
        if not math.isfinite(scaled.max()):
            return -1
        ids, chances = candidates(scaled, sampling)
        heights = chances.cumsum()
        draw = uniform(sampling.seed, Purpose.SAMPLING, np.array([position]), self.attempt)[0]
        return int(ids[heights.searchsorted(draw * heights[-1], side="right")])


class ForcedPrefixSampler(Sampler):
    """A sampler that picks given ids first, and samples those after them, which are `allowed`."""

    is_plain = False

    def __init__(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        attempt: int = 0,
        allowed: TokenFilter | None = None,
    ) -> None:
        super().__init__(sampling, attempt, allowed)
        self._left = list(reversed(ids))

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        return self._left.pop() if self._left else super().pick(logits, said_ids, position)


def apply_repetition_penalty(scores: Tensor, said: Tensor, penalty: float) -> Tensor:
    """The scores [V]; those of the ids `said` [k] are lowered by the factor `penalty`."""
    chosen = scores[said]
    return scores.scatter(0, said, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def candidates(
    scores: NDArray[np.float32], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that top-k, top-p and min-p leave, ascending, and the chances of each, up to 1.

    `scores` [V] are divided by the temperature. Of equally likely ids all are left, or none.
    """
    largest = scores.max()
    lowest = largest - _FAR
    if sampling.top_k is not None and sampling.top_k < len(scores):
        lowest = max(lowest, np.partition(scores, -sampling.top_k)[-sampling.top_k])
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.min_p and top_p == 1.0:  # rounding aside, what `least` leaves out below
        lowest = max(lowest, largest + math.log(sampling.min_p) - 1e-3)
    ids = np.flatnonzero(scores >= lowest)
    chances = np.exp(scores[ids].astype(np.float64) - largest)  # relative to the likeliest
    least = sampling.min_p or 0.0
    if top_p < 1.0:
        left_out = (1 - top_p) * chances.sum()
        # Ids with less than an equal share of that are all left out, and need no sorting.
        is_rare = chances < left_out / len(chances)
        rising = np.sort(chances[~is_rare])
        heights = chances[is_rare].sum() + rising.cumsum()
        count = int(heights.searchsorted(left_out, side="right"))
        least = max(least, rising[min(count, len(rising) - 1)])
    stays = chances >= least
    return ids[stays], chances[stays]
