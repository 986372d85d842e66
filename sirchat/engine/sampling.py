"""Chooses the next token: transformers' logits processors, and repeatable random draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sirchat.errors import ModelError
from sirchat.memory.draws import Purpose, uniform


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy. Same seed and conversation, same draws."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int = 0


class Sampler:
    """Picks one token from logits; another `attempt` at the same position draws other numbers."""

    def __init__(self, sampling: Sampling, attempt: int = 0) -> None:
        self._sampling = sampling
        self._attempt = attempt
        self._processors = _processors(sampling)

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        """The next token id.

        Args:
            logits: [V], raw.
            said_ids: gives the newest ids that the model sees, without the template's: as many as
                asked for, or all for 0. For the repetition penalty.
            position: stream position of the token to come; keys the draw.

        Raises ModelError where the logits are no numbers, as after a division by zero.
        """
        scores = logits
        if self._processors:
            wide = self._sampling.repetition_window
            context = said_ids(wide) if self._sampling.repetition_penalty != 1.0 else []
            ids = torch.tensor([context], dtype=torch.int64, device=logits.device)
            scores = self._processors(ids, logits[None].float())[0]
        if self._sampling.temperature == 0.0:
            likeliest = int(scores.argmax())  # NaN counts as the largest
            _refuse_nan(float(scores[likeliest]))
            return likeliest
        # On the CPU: not every device has float64, or sums in the same order each time.
        heights = torch.softmax(scores.cpu().double(), -1).cumsum(-1).numpy()  # [V]
        _refuse_nan(float(heights[-1]))
        at = np.array([position])
        draw = uniform(self._sampling.seed, Purpose.SAMPLING, at, self._attempt)[0]
        return int(np.searchsorted(heights, draw * heights[-1], side="right"))


def _refuse_nan(value: float) -> None:
    if math.isnan(value):
        raise ModelError(
            "the model's scores for the next token are not numbers",
            hint="its weights, or a saved chat's keys, may be damaged; or try --dtype float32",
        )


def _processors(sampling: Sampling) -> LogitsProcessorList:
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0.0:
        return chosen
    if sampling.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen
