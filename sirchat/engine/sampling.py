"""Chooses the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.errors import ModelError
from sirchat.memory.key_values import to_device
from sirchat.memory.random_numbers import Purpose, uniform

# Limits a reply to a format: from the reply's ids so far to a mask, bool [V], on the CPU, of those
# that may follow; or float32 [V], which is added to the logits.
Allowed = Callable[[Sequence[int]], Tensor]

CANDIDATES = 1024  # likeliest ids, which usually tell what top-k, top-p and min-p leave
_FAR = 25.0  # a score so much lower is too unlikely to count
AROUND = np.array([-1e-4, 1e-4])  # so near a limit sums in float32, as of `narrowed`, may differ


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
        self, sampling: Sampling, attempt: int = 0, allowed: Allowed | None = None
    ) -> None:
        self.sampling, self.attempt = sampling, attempt
        self._allowed = allowed
        self._picked: list[int] = []

    @property
    def is_plain(self) -> bool:
        """Whether `sampling` alone says which ids are picked: none are given, or not allowed."""
        return self._allowed is None

    @property
    def takes_likeliest(self) -> bool:
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
            scores = penalized(scores.float(), said, sampling.repetition_penalty)
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
        if (found := candidates(scores, sampling)) is not None:
            ids, heights = found[0], found[1].cumsum()
        else:  # on the CPU: not every device has float64, or sums in the same order each time
            chances = torch.softmax(narrowed(scores.cpu(), sampling).double(), -1)
            ids, heights = None, chances.cumsum(-1).numpy()  # [V]
        if math.isnan(heights[-1]):
            return -1
        draw = uniform(sampling.seed, Purpose.SAMPLING, np.array([position]), self.attempt)[0]
        drawn = int(heights.searchsorted(draw * heights[-1], side="right"))
        return drawn if ids is None else int(ids[drawn])


class FixedIds(Sampler):
    """A sampler that picks given ids in order, and ignores the logits."""

    is_plain = False

    def __init__(self, ids: Sequence[int]) -> None:
        self._left = list(reversed(ids))

    def is_exhausted(self) -> bool:
        """Whether all ids have been picked."""
        return not self._left

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        return self._left.pop()


class Continued(Sampler):
    """A sampler that picks given ids first, and samples those after them, which are `allowed`."""

    is_plain = False

    def __init__(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        attempt: int = 0,
        allowed: Allowed | None = None,
    ) -> None:
        super().__init__(sampling, attempt, allowed)
        self._left = list(reversed(ids))

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        return self._left.pop() if self._left else super().pick(logits, said_ids, position)


def penalized(scores: Tensor, said: Tensor, penalty: float) -> Tensor:
    """The scores [V]; those of the ids `said` [k] are lowered by the factor `penalty`."""
    chosen = scores[said]
    return scores.scatter(0, said, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def candidates(scores: Tensor, sampling: Sampling) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """What top-k, top-p and min-p leave of the raw scores [V]: ids, ascending, and their chances.

    int64 and float64 [n]; the scores' device is waited for once. None if the limits leave all ids,
    or more than can be found among the 1,024 likeliest ids alone.
    """
    if not sampling.narrows:
        return None
    if scores.device.type == "cpu":
        values, ids, total, rest = _leading_on_cpu(scores.float().numpy(), sampling)
    else:
        found = leading(scores.float() / sampling.temperature).cpu().numpy()
        total, pairs = found[0], found[1:].reshape(2, -1)
        rest = pairs[0, -1] if pairs.shape[1] < len(scores) else -np.inf
        values, ids = pairs[:, pairs[1].argsort()]
    falling = np.append(np.sort(values[values > -np.inf])[::-1], rest)
    count = _count_left(falling, total, sampling) if math.isfinite(total) else 0
    stays = values >= falling[count - 1]
    if not count or (np.count_nonzero(stays) > count and scores.device.type == "cpu"):
        return None  # there, only torch's sort tells which of equal scores top-p leaves
    chances = np.exp(values[stays].astype(np.float64) - falling[0])
    return ids[stays].astype(np.int64), chances / chances.sum()


def leading(scores: Tensor) -> Tensor:
    """The sum of exp(score - largest) over scores [V], then the k largest scores, then their ids.

    float32 [1 + 2 k] on the scores' device, for which nothing waits; k is at most 1,024.
    """
    best = scores.topk(min(CANDIDATES, len(scores)))
    total = (scores - best.values[:1]).exp().sum()
    return torch.cat([total[None], best.values, best.indices.float()])  # ids below 2^24 are exact


def _leading_on_cpu(scores: NDArray[Any], sampling: Sampling) -> tuple[Any, Any, float, float]:
    """The largest raw scores by temperature, their ids, the sum (0: theirs), the others' bound."""
    largest, by = scores.max(), np.float32(sampling.temperature)
    total, rest = 0.0, largest - _FAR * by
    ids = np.flatnonzero(scores >= rest)
    if not (math.isfinite(largest) and (sampling.top_k or 1) <= len(ids) <= CANDIDATES):
        with np.errstate(invalid="ignore"):  # then the sum is not finite
            total = np.exp(scores / by - largest / by).sum()
        is_long = len(scores) > CANDIDATES
        rest = np.partition(scores, -CANDIDATES)[-CANDIDATES] if is_long else -np.inf
        ids = np.flatnonzero(scores >= rest)
    return scores[ids] / by, ids, total, rest / by


def _count_left(falling: NDArray[Any], total: float, sampling: Sampling) -> int:
    """How many of the largest scores are left; 0 if unclear. The last one bounds all others."""
    chances = np.exp(falling.astype(np.float64) - falling[0])  # relative to the likeliest
    if sampling.top_k is not None:
        chances = chances[falling >= falling[min(sampling.top_k, len(falling) - 1) - 1]]
        if len(chances) == len(falling):
            return 0
        total = 0.0
    few = many = len(chances)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        likelier = (chances.cumsum() - chances) / (total or chances.sum())
        few, many = likelier.searchsorted(sampling.top_p + AROUND)
    if sampling.min_p:
        least, most = (-chances).searchsorted(-sampling.min_p * (1 - AROUND))
        few, many = min(few, least), min(many, most)
    return int(few) if few == many and falling[few - 1] > falling[-1] else 0


def narrowed(scores: Tensor, sampling: Sampling) -> Tensor:
    """The scores [V] divided by the temperature; -inf where top-k, top-p or min-p exclude an id."""
    scores = scores.float() / sampling.temperature
    if sampling.top_k is not None:
        least = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        rising = torch.from_numpy(np.sort(scores.numpy()))  # much faster than torch's sort
        count = int((rising.softmax(-1).cumsum(-1)[:-1] <= 1 - sampling.top_p).sum())  # left out
        if count and rising[count - 1] == rising[count]:
            scores = scores.index_fill(0, scores.sort().indices[:count], -torch.inf)
        else:
            scores = scores.masked_fill(scores < rising[count], -torch.inf)
    if sampling.min_p is not None:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.max(), -torch.inf)
    return scores
