"""What a retriever sees: the archived tokens to score, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.archive import Archive
from sirchat.memory.cache import LayerRotation
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import Ledger
from sirchat.memory.random_numbers import Purpose, uniform
from sirchat.memory.rope import unrotated
from sirchat.models.attention_hook import LayerQueries

_BATCH = 8_192  # tokens whose keys and values are read at once


@dataclass(frozen=True)
class Query:
    """The m tokens with which archived tokens are compared: usually those of the new turn."""

    key_values: KeyValues  # empty if the retriever needs none
    layer_queries: Sequence[LayerQueries] = ()  # of the turn; empty if not recorded
    of_template: NDArray[np.bool_] | None = None  # mask [m] of the template's tokens, if known
    start: int = 0  # stream position of the new turn's first token

    def of_layer(self, layer: int) -> LayerQueries:
        """The new turn's query vectors in one layer.

        Raises LookupError if there are none, or if they can't be compared with the cached keys.
        """
        keys = self.key_values.tensors[2 * layer]
        if layer >= len(self.layer_queries) or not self.layer_queries[layer].is_comparable_with(
            keys
        ):
            raise LookupError("this model's queries cannot be compared with its KV cache")
        return self.layer_queries[layer]


@dataclass(frozen=True)
class Candidates:
    """The n archived tokens that a retriever scores for a turn.

    `positions` [n] are their stream positions, ascending; `rotations` has one entry for each layer.
    """

    archive: Archive
    positions: Positions
    query: Query
    rotations: Sequence[LayerRotation]
    ledger: Ledger

    def pairs(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, k, D] of the tokens in one layer, in blocks, not rotated."""
        for start in range(0, len(self.positions), _BATCH):
            block = self.archive.fetch(self.positions[start : start + _BATCH], layer)
            yield _pair(block, 0, self.rotations[layer])

    def query_pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """The query's keys and values [H, m, D] in one layer, not rotated."""
        return _pair(self.query.key_values, layer, self.rotations[layer])

    def random_numbers(self) -> NDArray[np.float64]:
        """A number in [0, 1) for each token [n]; the same turn gets the same numbers."""
        return uniform(self.ledger.seed, Purpose.RECALL, self.positions, self.query.start)


def _pair(block: KeyValues, layer: int, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    written_at = torch.from_numpy(block.written_at)
    keys, values = block.tensors[2 * layer : 2 * layer + 2]
    return (
        unrotated(keys, written_at, rotation.key),
        unrotated(values, written_at, rotation.value),
    )
