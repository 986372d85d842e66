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
from sirchat.memory.random_numbers import Purpose, uniform

# Limits a reply to a format: from the reply's ids so far to a mask, bool [V], on the CPU, of those
# that may follow.
TokenFilter = Callable[[Sequence[int]], Tensor]

Scores = NDArray[np.float32]  # [V]

_BLOCKS = 1024  # of scores, by which the largest are found
_MAX_SCORE_GAP = 80.0  # an id with a score so much below the largest is never drawn


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling; temperature 0 always takes the most likely token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int = 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leave out ids."""
        return bool(self.top_k or self.min_p or (self.top_p or 1.0) < 1.0)


class Sampler:
    """Picks each next token of a reply; another `attempt` draws other random numbers."""

    def __init__(
        self, sampling: Sampling, attempt: int = 0, allowed: TokenFilter | None = None
    ) -> None:
        self.sampling, self.attempt = sampling, attempt
        self._allowed = allowed
        self._picked_ids: list[int] = []

    @property
    def is_unconstrained(self) -> bool:
        """Whether `sampling` alone decides: no ids are forced, and no filter leaves ids out."""
        return self._allowed is None

    @property
    def is_greedy(self) -> bool:
        """Whether the id of the largest logit is picked each time."""
        sampling = self.sampling
        is_plain = sampling.temperature == 0 and sampling.repetition_penalty == 1
        return is_plain and self.is_unconstrained

    def pick(self, logits: Tensor, recent_ids: Callable[[int], list[int]], position: int) -> int:
        """The next token's id, from its raw logits [V] and its stream position.

        `recent_ids(n)` returns the newest n held ids, for the repetition penalty. Raises ModelError
        if the logits are NaN, or if no id is allowed to follow.
        """
        if self.is_greedy and logits.device.type != "cpu":
            best = logits.max(-1)  # NaN counts as the largest
            return _valid_id(int(torch.where(best.values.isnan(), -1, best.indices)))  # one wait
        # On the CPU: not every device has float64, or sums in the same order each time.
        scores = logits.float().cpu().numpy()
        if self._allowed is not None:
            mask = self._allowed(self._picked_ids).numpy()
            if not mask.any():
                raise ModelError("no token may follow in the format of this reply")
            scores = np.where(mask, scores, np.float32(-np.inf))
        sampling, penalty = self.sampling, self.sampling.repetition_penalty
        if penalty != 1.0:
            ids = recent_ids(sampling.repetition_window)
            scores, usual = scores.copy(), scores[ids]
            scores[ids] = np.where(usual < 0, usual * penalty, usual / penalty)
        if sampling.temperature:
            numbers = uniform(sampling.seed, Purpose.SAMPLING, np.array([position]), self.attempt)
            scores = np.divide(scores, sampling.temperature, dtype=np.float32)
            chosen = _draw(scores, sampling, numbers[0])
        else:
            chosen = int(scores.argmax())  # the first NaN, if any
            chosen = -1 if math.isnan(scores[chosen]) else chosen
        if self._allowed is not None:
            self._picked_ids.append(chosen)
        return _valid_id(chosen)


class ForcedPrefixSampler(Sampler):
    """Picks the given `ids` first, and samples the ids after them."""

    is_unconstrained = False

    def __init__(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        attempt: int = 0,
        allowed: TokenFilter | None = None,
    ) -> None:
        super().__init__(sampling, attempt, allowed)
        self._forced_ids = list(reversed(ids))  # the next one last

    def pick(self, logits: Tensor, recent_ids: Callable[[int], list[int]], position: int) -> int:
        if self._forced_ids:
            return self._forced_ids.pop()
        return super().pick(logits, recent_ids, position)


def _valid_id(token_id: int) -> int:
    if token_id < 0:
        raise ModelError(
            "the model's scores for the next token are not numbers",
            hint="its weights, or a saved chat's keys, may be damaged; or try --dtype float32",
        )
    return token_id


def _draw(scores: Scores, sampling: Sampling, number: float) -> int:
    """The id that a random number from 0 to 1 draws; -1 if the scores [V] are not finite.

    `scores` are divided by the temperature.
    """
    largest = scores.max()
    if not math.isfinite(largest):
        return -1
    if sampling.truncates:
        ids, chances = candidates(scores, sampling)
        return int(ids[_index_at(chances, number * chances.sum())])
    weights = _weights(scores, largest)
    # A sum of each block is faster than as many sums as there are ids.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCKS), dtype=np.float64)
    target = number * sums.sum()
    block = _index_at(sums, target)
    start = block * _BLOCKS
    return start + _index_at(weights[start : start + _BLOCKS], target - sums[:block].sum())


def _index_at(weights: NDArray[Any], target: float) -> int:
    """The index of the weight with which the sum of `weights` [n] so far exceeds `target`."""
    cumulative: NDArray[np.float64] = weights.cumsum(dtype=np.float64)
    last = cumulative.searchsorted(cumulative[-1])  # if rounding makes `target` the whole sum
    return int(min(cumulative.searchsorted(target, side="right"), last))


def candidates(scores: Scores, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids [k] that top-k, top-p and min-p leave, ascending, and their weights [k].

    `scores` [V] are divided by the temperature. Weights are proportional to probabilities; the
    largest is 1. Of equally likely ids, all are left or none.
    """
    largest, top_p = scores.max(), 1.0 if sampling.top_p is None else sampling.top_p
    min_score = lowest = largest - _MAX_SCORE_GAP
    if sampling.top_k is not None and sampling.top_k < len(scores):
        min_score = max(min_score, _nth_largest(scores, sampling.top_k))
    if sampling.min_p and top_p == 1.0:  # rounding aside, as below
        min_score = max(min_score, largest + math.log(sampling.min_p) - 1e-3)
    if top_p < 1.0:
        left = scores[scores >= min_score] if min_score > lowest else scores
        weights = _weights(left, largest)
        total = weights.sum(dtype=np.float64)
        left_out = (1 - top_p) * total
        # Ids with less than an equal share of that are all left out, and need no sorting.
        some = np.flatnonzero(weights >= left_out / len(left))
        likely, weights = left[some], weights[some]
        ascending = np.sort(weights)
        cumulative = ascending.cumsum(dtype=np.float64)
        cumulative += total - cumulative[-1]
        count = int(cumulative.searchsorted(left_out, side="right"))
        least = ascending[min(count, len(ascending) - 1)]
        min_score = likely[weights >= least].min()
    ids = np.flatnonzero(scores >= min_score)
    weights = np.exp(scores[ids].astype(np.float64) - largest)
    is_left = weights >= (sampling.min_p or 0.0)
    return ids[is_left], weights[is_left]


def _weights(scores: Scores, largest: np.float32) -> Scores:
    weights: Scores = scores - largest
    np.exp(weights, out=weights)  # a second array of this size takes as long as the sum
    return weights


def _nth_largest(scores: Scores, n: int) -> np.float32:
    whole = len(scores) // _BLOCKS * _BLOCKS
    if n <= _BLOCKS <= whole:  # the n-th largest of all is at least that of each block's largest
        of_blocks = scores[:whole].reshape(-1, _BLOCKS).max(0)
        scores = scores[scores >= np.partition(of_blocks, -n)[-n]]
    nth: np.float32 = np.partition(scores, -n)[-n]
    return nth
