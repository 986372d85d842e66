"""What is read from the hidden states of each token, whichever way the token is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sirchat.models.encoder import Encoder
from sirchat.models.scorer import Scorer


@dataclass(eq=False)
class Readings:
    """What is read from the states of m ids: a request, which `Readout.fill` answers."""

    encodes: bool = False  # whether the encoder's numbers are wanted
    scores: list[float] = field(default_factory=list)  # [m], by the model's scorer; NaN without one
    numbers: Tensor | None = None  # [m, D], of the encoder, on the CPU; None if not wanted

    def part(self, at: int) -> Readings:
        """The readings of the id with this index."""
        numbers = None if self.numbers is None else self.numbers[at : at + 1]
        return Readings(self.encodes, self.scores[at : at + 1], numbers)


@dataclass(frozen=True, eq=False)
class Readout:
    """Computes a model's scores and encodings from the states after the layers of both."""

    scorer: Scorer
    encoder: Encoder

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states are needed, ascending, counted from 1."""
        return tuple(sorted({*self.scorer.layers, *self.encoder.layers}))

    def fill(self, readings: Readings, states: Tensor | None, count: int) -> None:
        """Answer a request about `count` ids from their states [count, layers x d], if any."""
        if states is None or not self.scorer.layers:
            readings.scores = [math.nan] * count
        else:
            readings.scores = self.scorer.scores(self._of(states, self.scorer.layers))
        if readings.encodes and states is not None and self.encoder.layers:
            numbers = self.encoder.numbers(self._of(states, self.encoder.layers))
            readings.numbers = numbers.float().cpu()

    def on_device(self, states: Tensor) -> Tensor:
        """One token's score (NaN without a scorer) and numbers, float32 [1, 1 + D], from states."""
        score = states.new_full((1, 1), math.nan)
        if self.scorer.layers:
            score = self.scorer.of_states(self._of(states, self.scorer.layers)).view(1, 1)
        if not self.encoder.layers:
            return score
        return torch.cat((score, self.encoder.numbers(self._of(states, self.encoder.layers))), 1)

    def _of(self, states: Tensor, layers: Sequence[int]) -> Tensor:
        """The states of some of the layers, [m, layers x d]."""
        if len(layers) == len(self.layers):
            return states
        each = states.chunk(len(self.layers), 1)
        return torch.cat([each[self.layers.index(number)] for number in layers], 1)
