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
        if self._allowed is None:
            return self._choose(logits, recent_ids, position)
        mask_or_bias = self._allowed(self._picked_ids)
        is_mask = mask_or_bias.dtype == torch.bool
        if not (mask_or_bias if is_mask else mask_or_bias > -math.inf).any():
            raise ModelError("no token may follow in the format of this reply")
        (mask_or_bias,) = to_device([mask_or_bias], logits.device)
        if is_mask:
            filtered = logits.masked_fill(~mask_or_bias, -math.inf)
        else:
            filtered = logits.float() + mask_or_bias
        self._picked_ids.append(self._choose(filtered, recent_ids, position))
        return self._picked_ids[-1]

    def _choose(self, logits: Tensor, recent_ids: Callable[[int], list[int]], position: int) -> int:
        sampling, scores = self.sampling, logits
        if sampling.repetition_penalty != 1.0:
            ids = torch.tensor(recent_ids(sampling.repetition_window), dtype=torch.int64)
            (ids,) = to_device([ids], scores.device)
            scores = apply_repetition_penalty(scores.float(), ids, sampling.repetition_penalty)
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
        """An id drawn by raw scores [V]; -1 if the scores are not finite."""
        sampling = self.sampling
        # On the CPU: not every device has float64, or sums in the same order each time.
        scaled = (scores.float() / sampling.temperature).cpu().numpy()
        if not math.isfinite(scaled.max()):
            return -1
        ids, weights = candidates(scaled, sampling)
        cumulative = weights.cumsum()
        number = uniform(sampling.seed, Purpose.SAMPLING, np.array([position]), self.attempt)[0]
        return int(ids[cumulative.searchsorted(number * cumulative[-1], side="right")])


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


def apply_repetition_penalty(scores: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """The scores [V], with the scores of `ids` [k] lowered by the factor `penalty`."""
    chosen = scores[ids]
    return scores.scatter(0, ids, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def candidates(
    scores: NDArray[np.float32], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids [k] that top-k, top-p and min-p leave, ascending, and their weights [k].

    `scores` [V] are divided by the temperature. Weights are proportional to probabilities; the
    largest is 1. Of equally likely ids, all are left or none.
    """
    largest = scores.max()
    min_score = largest - _MAX_SCORE_GAP
    if sampling.top_k is not None and sampling.top_k < len(scores):
        min_score = max(min_score, np.partition(scores, -sampling.top_k)[-sampling.top_k])
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.min_p and top_p == 1.0:  # rounding aside, as below
        min_score = max(min_score, largest + math.log(sampling.min_p) - 1e-3)
    ids = np.flatnonzero(scores >= min_score)
    weights = np.exp(scores[ids].astype(np.float64) - largest)
    min_weight = sampling.min_p or 0.0
    if top_p < 1.0:
        left_out = (1 - top_p) * weights.sum()
        # Ids with less than an equal share of that are all left out, and need no sorting.
        is_rare = weights < left_out / len(weights)
        ascending = np.sort(weights[~is_rare])
        cumulative = weights[is_rare].sum() + ascending.cumsum()
        count = int(cumulative.searchsorted(left_out, side="right"))
        min_weight = max(min_weight, ascending[min(count, len(ascending) - 1)])
    is_left = weights >= min_weight
    return ids[is_left], weights[is_left]
