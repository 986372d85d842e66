"""Chooses the next token from logits, and guesses several next tokens from earlier text."""

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

# Limits a reply to a format: from the reply's ids so far to a mask [V], on the CPU, of those that
# may follow.
Allowed = Callable[[Sequence[int]], Tensor]

_MATCH = 3  # how many newest tokens must have occurred before, if the last guess was right
_LONG = 8  # how many at the start, and if the last guess was wrong
_WITHIN = 2**14  # newest tokens that are searched
_BRIEF, _WHOLE = 5, 15  # tokens guessed after a short and after a long match
_PAYS = 3  # minimum number of right tokens with which the larger pass saves time
_LONGEST_REST = 256  # maximum number of tokens for which nothing is guessed


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


class Sampler:
    """Picks each next token of a reply; each `attempt` at it gets different random numbers."""

    def __init__(
        self, sampling: Sampling, attempt: int = 0, allowed: Allowed | None = None
    ) -> None:
        self._allowed = allowed
        self._picked: list[int] = []
        self._sampling = sampling
        self._attempt = attempt

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        """The next token's id, from its raw logits [V] and its stream position.

        `said_ids`, of a number, returns so many newest held ids, for the repetition penalty. Raises
        ModelError if the logits are NaN, or if no id is allowed to follow.
        """
        if self._allowed is None:
            return self._choose(logits, said_ids, position)
        mask = self._allowed(self._picked).to(logits.device)
        if not mask.any():
            raise ModelError("no token may follow in the format of this reply")
        allowed = logits.masked_fill(~mask, -math.inf)
        self._picked.append(self._choose(allowed, said_ids, position))
        return self._picked[-1]

    def _choose(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        sampling, scores = self._sampling, logits
        if sampling.repetition_penalty != 1.0:
            said = torch.tensor(said_ids(sampling.repetition_window), dtype=torch.int64)
            scores = penalized(scores.float(), said.to(scores.device), sampling.repetition_penalty)
        if sampling.temperature == 0.0:
            likeliest = int(scores.argmax())  # NaN counts as the largest
            if math.isnan(scores[likeliest]):
                raise _nan_error()
            return likeliest
        scores = narrowed(scores, sampling)
        # On the CPU: not every device has float64, or sums in the same order each time.
        heights = torch.softmax(scores.cpu().double(), -1).cumsum(-1).numpy()  # [V]
        if math.isnan(heights[-1]):
            raise _nan_error()
        at = np.array([position])
        draw = uniform(sampling.seed, Purpose.SAMPLING, at, self._attempt)[0]
        return int(np.searchsorted(heights, draw * heights[-1], side="right"))


class FixedIds(Sampler):
    """A sampler that picks given ids in order, and ignores the logits."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._left = list(reversed(ids))

    def is_exhausted(self) -> bool:
        """Whether all ids have been picked."""
        return not self._left

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        return self._left.pop()


def _nan_error() -> ModelError:
    return ModelError(
        "the model's scores for the next token are not numbers",
        hint="its weights, or a saved chat's keys, may be damaged; or try --dtype float32",
    )


def penalized(scores: Tensor, said: Tensor, penalty: float) -> Tensor:
    """The scores [V]; those of the ids `said` [k] are lowered by the factor `penalty`."""
    chosen = scores[said]
    return scores.scatter(0, said, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def narrowed(scores: Tensor, sampling: Sampling) -> Tensor:
    """The scores [V] divided by the temperature; -inf where top-k, top-p or min-p exclude an id."""
    scores = scores.float() / sampling.temperature
    if sampling.top_k is not None:
        least = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None:
        rising, order = scores.sort()
        is_left_out = rising.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_left_out[-1] = False
        scores = scores.masked_fill(is_left_out.scatter(0, order, is_left_out), -torch.inf)
    if sampling.min_p is not None:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.max(), -torch.inf)
    return scores


class PromptLookup:
    """Guesses the next tokens of one reply: those that followed the same text earlier.

    After a wrong guess it pauses for some tokens; each further one in a row doubles the pause.
    """

    def __init__(self) -> None:
        self._least = _LONG
        self._rest = 0  # tokens for which nothing is guessed
        self._next_rest = 8

    def guess(self, ids: NDArray[Any], token_id: int, most: int) -> list[int]:
        """At most `most` ids that may follow `token_id`, which follows the `ids` [seen]."""
        if self._rest:
            self._rest -= 1
            return []
        if most < _PAYS:
            return []
        recent = np.append(ids[-_WITHIN:], token_id)
        at, length = _longest_match(recent)
        if length < self._least:
            return []
        count = min(most, _WHOLE if length == _LONG else _BRIEF)
        guessed: list[int] = recent[at : at + count].tolist()
        return guessed if len(guessed) >= _PAYS else []

    def learn(self, right: int) -> None:
        """Adapt later guesses to the last one, of which the first `right` tokens were right."""
        self._least = _MATCH if right >= _PAYS else _LONG
        if right >= _PAYS:
            self._next_rest = 8
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)


def _longest_match(ids: NDArray[Any]) -> tuple[int, int]:
    """The longest run at the end of `ids` that also occurs earlier: where it ends, its length.

    The length is at most eight; (0, 0) if fewer than three ids match.
    """
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    ends = ends[ends >= _MATCH - 1]
    length, best = 1, 0
    while len(ends) and length < _LONG:
        if length >= _MATCH:
            best = int(ends[-1])
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[-1 - length]]
        length += bool(len(ends))
    if len(ends) and length >= _MATCH:
        best = int(ends[-1])
    return (best + 1, length) if length >= _MATCH else (0, 0)
