"""The experts of a layer (mixture of experts), with weights that stay packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.models.packed import PackedLinear


class PackedExperts(nn.Module):
    """Replaces the experts of a transformers layer, which are stacked tensors, by packed layers.

    Args:
        before: the experts of the transformers layer; their gate and their biases are still used.
        layers: for each of `gate`, `up` and `down`, the packed layer of each expert.
    """

    def __init__(self, before: Any, layers: Mapping[Any, Sequence[PackedLinear]]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.ModuleList(layers[one]) for one in ("gate", "up", "down")
        )
        self.gate_up_proj_bias = getattr(before, "gate_up_proj_bias", None)  # [E, 2 F]
        self.down_proj_bias = getattr(before, "down_proj_bias", None)  # [E, K]
        before.gate_up_proj = before.down_proj = None
        self._before = (before,)  # in a tuple, so that it is not a submodule

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Compute, for each row of x [m, K], the weighted sum of the outputs of its k experts.

        `chosen` [m, k] are the numbers of each row's experts, `shares` [m, k] the experts' weights
        in the sum.
        """
        out = torch.zeros_like(x)
        for expert in set(chosen.flatten().tolist()):
            rows, places = torch.where(chosen == expert)
            y = self._of_expert(expert, x[rows]) * shares[rows, places, None]
            out.index_add_(0, rows, y.to(out.dtype))
        return out

    def _of_expert(self, expert: int, x: Tensor) -> Tensor:
        before = self._before[0]
        gate, up = self.gate[expert](x), self.up[expert](x)  # [n, F] each
        if before.is_concatenated:
            both = torch.cat((gate, up), -1)
        else:  # the rows of gate and up alternate
            both = torch.stack((gate, up), -1).flatten(-2)
        if self.gate_up_proj_bias is not None:
            both = both + self.gate_up_proj_bias[expert]
        y: Tensor = self.down[expert](before._apply_gate(both))
        return y if self.down_proj_bias is None else y + self.down_proj_bias[expert]
