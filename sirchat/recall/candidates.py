"""What a retriever sees: the archived tokens to score, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sirchat.memory.archive import Archive
from sirchat.memory.cache import LayerRotation
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.rope import unrotated

_BATCH_TOKENS = 8_192  # tokens whose keys and values are read at once


@dataclass(frozen=True)
class Candidates:
    """The n archived tokens that a retriever scores for a turn.

    `positions` [n] are their stream positions, ascending; `query` has the keys and values of the m
    tokens with which they are compared, usually those of the turn, and none if the retriever needs
    none; `rotations` has one entry for each layer.
    """

    archive: Archive
    positions: Positions
    query: KeyValues
    rotations: Sequence[LayerRotation]

    def pairs(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, k, D] of the tokens in one layer, in blocks, not rotated."""
        for start in range(0, len(self.positions), _BATCH_TOKENS):
            block = self.archive.fetch(self.positions[start : start + _BATCH_TOKENS], layer)
            yield _pair(block, 0, self.rotations[layer])

    def query_pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """The query's keys and values [H, m, D] in one layer, not rotated."""
        return _pair(self.query, layer, self.rotations[layer])


def _pair(block: KeyValues, layer: int, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    written_at = torch.from_numpy(block.written_at)
    keys, values = block.tensors[2 * layer : 2 * layer + 2]
    return (
        unrotated(keys, written_at, rotation.key),
        unrotated(values, written_at, rotation.value),
    )
