"""A sentence encoder: a linear map from the hidden states of a sentence's tokens to its vector.

A sentence's vector is the mean of its tokens' numbers plus a bias, of length 1: so each token's
numbers can be computed as it is read, before anyone knows where the sentence ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sirchat.models.state_map import StateMap

_MOST = 127  # of an int8


class Encoder(StateMap):
    """Computes D numbers for each token: weight [layers x d, D], and a bias [D] of sentences.

    In a file, the weight is int8, with a scale for each of its rows.
    """

    kind: ClassVar[str] = "encoder"

    @property
    def size(self) -> int:
        """D, the length of a sentence's vector; 0 if there is no encoder."""
        return len(self.bias)

    def numbers(self, states: Tensor) -> Tensor:
        """The numbers [m, D] of m tokens, from their hidden states [m, layers x d]."""
        return states.float() @ self.weight.to(states.device)

    def pooled(self, means: Tensor) -> Tensor:
        """The unit vectors [..., D] of sentences, from the means of their tokens' numbers."""
        return F.normalize(means + self.bias.to(means.device), dim=-1)

    def _stored(self) -> dict[str, Tensor]:
        scale = (self.weight.abs().amax(1, keepdim=True) / _MOST).clamp_min(1e-30)
        rounded = (self.weight / scale).round().to(torch.int8)
        return {"weight": rounded, "scale": scale, "bias": self.bias}

    @classmethod
    def _restored(cls, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        weight, bias = tensors["weight"].float() * tensors["scale"], tensors["bias"].float()
        if weight.ndim != 2 or bias.shape != weight.shape[1:]:
            raise ValueError
        return weight, bias
