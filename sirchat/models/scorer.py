"""A scorer: a linear map from a token's hidden states to the score that the policy `learned` uses.

The score is the logarithm of what `sirchat train scorer` was told to predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from sirchat.models.state_map import StateMap


class Scorer(StateMap):
    """Predicts a score for each token: weight [layers x d], and a single bias []."""

    kind: ClassVar[str] = "scorer"

    def scores(self, states: Tensor) -> list[float]:
        """Compute the scores of m tokens from their hidden states [m, layers x d]."""
        scores: list[float] = self.of_states(states).tolist()
        return scores

    def _stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias.view(1)}

    @classmethod
    def _restored(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight, bias = tensors["weight"].float(), tensors["bias"].float()
        if weight.ndim != 1 or bias.numel() != 1:
            raise ValueError
        return {"weight": weight, "bias": bias.view(())}
