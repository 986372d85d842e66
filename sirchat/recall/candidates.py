"""The input of a retriever: the archived tokens to score, and the tokens they are compared with."""

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
    """The n archived tokens that a retriever scores for a turn."""

    archive: Archive
    positions: Positions  # [n], in the stream, ascending
    # Of the m tokens that the archived ones are compared with, usually those of the turn; m is 0
    # for a retriever that needs no turn.
    query: KeyValues
    rotations: Sequence[LayerRotation]  # of each layer

    def pairs(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of the tokens' keys and values [H, k, D] in one layer, unrotated."""
        for start in range(0, len(self.positions), _BATCH_TOKENS):
            block = self.archive.fetch(self.positions[start : start + _BATCH_TOKENS], layer)
            yield _pair(block, 0, self.rotations[layer])

    def query_pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, m, D] of the query in one layer, unrotated."""
        return _pair(self.query, layer, self.rotations[layer])


def _pair(block: KeyValues, layer: int, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    written_at = torch.from_numpy(block.written_at)
    keys, values = block.tensors[2 * layer : 2 * layer + 2]
    return (
        unrotated(keys, written_at, rotation.key),
        unrotated(values, written_at, rotation.value),
    )
