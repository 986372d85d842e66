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


@dataclass(frozen=True)
class Sampling:
    """Parameters for sampling the next token; temperature 0 always takes the most likely token.

    The same seed gives the same tokens in the same chat.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int = 0


Allowed = Callable[[Sequence[int]], Tensor]
"""A function that limits a reply to a format.

It takes the ids of the reply's beginning, and returns a mask [V], on the CPU, of the ids that may
follow.
"""


class Sampler:
    """Picks each next token of a reply from logits.

    `sampling` has the sampling parameters. `attempt` is the number of earlier replies to the same
    message; each attempt gets different random numbers. `allowed`, if given, is a function that
    says which tokens may follow in the reply.
    """

    def __init__(
        self, sampling: Sampling, attempt: int = 0, allowed: Allowed | None = None
    ) -> None:
        self._allowed = allowed
        self._picked: list[int] = []
        self._sampling = sampling
        self._attempt = attempt

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        """Pick the next token; returns its id.

        Args:
            logits: raw logits [V] for the next token.
            said_ids: a function for the repetition penalty. It takes a number, and returns that
                many of the newest ids in the cache, leaving out ids of the chat template; for 0, it
                returns all of these ids.
            position: stream position of the next token; the random number depends on it.

        Raises ModelError if the logits are NaN, as after a division by zero, or if no id is allowed
        to follow.
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
            _refuse_nan(float(scores[likeliest]))
            return likeliest
        scores = narrowed(scores, sampling)
        # On the CPU: not every device has float64, or sums in the same order each time.
        heights = torch.softmax(scores.cpu().double(), -1).cumsum(-1).numpy()  # [V]
        _refuse_nan(float(heights[-1]))
        at = np.array([position])
        draw = uniform(sampling.seed, Purpose.SAMPLING, at, self._attempt)[0]
        return int(np.searchsorted(heights, draw * heights[-1], side="right"))


class FixedIds(Sampler):
    """A sampler that picks the ids of a given list in order, and ignores the logits."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._left = list(reversed(ids))

    def are_picked(self) -> bool:
        """Whether all ids of the list have been picked."""
        return not self._left

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        return self._left.pop()


def _refuse_nan(value: float) -> None:
    if math.isnan(value):
        raise ModelError(
            "the model's scores for the next token are not numbers",
            hint="its weights, or a saved chat's keys, may be damaged; or try --dtype float32",
        )


def penalized(scores: Tensor, said: Tensor, penalty: float) -> Tensor:
    """The scores [V] of all ids, with a repetition penalty for the ids `said` [k].

    A positive score of these ids is divided by `penalty`; a negative one is multiplied by it.
    """
    chosen = scores[said]
    return scores.scatter(0, said, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def narrowed(scores: Tensor, sampling: Sampling) -> Tensor:
    """The scores [V] of all ids, divided by the temperature.

    Ids that top-k, top-p or min-p exclude get -infinity.
    """
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


_MATCH = 3  # how many newest tokens must have occurred before, if the last guess was right
_LONG = 8  # how many at the start, and if the last guess was wrong
_WITHIN = 2**14  # newest tokens that are searched
_BRIEF, _WHOLE = 5, 15  # tokens guessed after a short and after a long match
_PAYS = 3  # minimum number of right tokens with which the larger pass saves time
_LONGEST_REST = 256  # maximum number of tokens for which nothing is guessed


class PromptLookup:
    """Guesses the next tokens of one reply: the tokens that followed the same text earlier.

    After a wrong guess, nothing is guessed for some tokens. Each further wrong guess in a row
    doubles this pause.
    """

    def __init__(self) -> None:
        self._least = _LONG
        self._rest = 0  # tokens for which nothing is guessed
        self._next_rest = 8

    def guess(self, ids: NDArray[Any], token_id: int, most: int) -> list[int]:
        """Guess the ids that follow `token_id`; returns at most `most` ids, or an empty list.

        `ids` [seen] are all ids of the conversation before `token_id`.
        """
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
        """Adapt later guesses to the result of the last guess.

        `right` is how many tokens at the beginning of the last guess were right.
        """
        self._least = _MATCH if right >= _PAYS else _LONG
        if right >= _PAYS:
            self._next_rest = 8
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)


def _longest_match(ids: NDArray[Any]) -> tuple[int, int]:
    """Find the longest run of tokens at the end of `ids` that also occurs earlier in `ids`.

    Returns the index right after the newest earlier occurrence of this run, and the run's length
    (at most eight); returns (0, 0) if fewer than three tokens match.
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
