"""Keys and values of tokens, as the model first wrote them, and states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.transfers import to_device

Positions = NDArray[np.int64]  # of tokens in the stream, the whole conversation

# A copy of the states of all recurrent and convolution layers, one dictionary for each layer; the
# key of a tensor is its kind, `conv` or `recurrent`, and its number.
CacheState = tuple[dict[tuple[str, int], Tensor], ...]


@dataclass(frozen=True)
class KeyValues:
    """The keys and values of n tokens, of one layer or of all.

    `positions` [n] are the tokens' stream positions, `written_at` [n] the rotary positions of their
    keys. `tensors` has two for each layer, keys then values, each [H, n, D].
    """

    positions: Positions
    written_at: NDArray[np.int64]
    tensors: list[Tensor]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device | str) -> KeyValues:
        """The same on `device`."""
        tensors = [tensor.to(device) for tensor in self.tensors]
        return KeyValues(self.positions, self.written_at, tensors)

    def take(self, index: NDArray[np.int64]) -> KeyValues:
        """A copy of those with the indices `index` [k]."""
        chosen = torch.from_numpy(index)
        tensors = [tensor.index_select(1, chosen.to(tensor.device)) for tensor in self.tensors]
        return KeyValues(self.positions[index], self.written_at[index], tensors)


def merged(first: KeyValues, second: KeyValues) -> KeyValues:
    """Copies of both, in ascending order of position, on the devices of the first."""
    positions = np.concatenate([first.positions, second.positions])
    order = np.argsort(positions)
    chosen = torch.from_numpy(order)
    tensors = [
        torch.cat([a, to_device(b, a.device)], dim=1).index_select(1, chosen.to(a.device))
        for a, b in zip(first.tensors, second.tensors, strict=True)
    ]
    written_at = np.concatenate([first.written_at, second.written_at])[order]
    return KeyValues(positions[order], written_at, tensors)
