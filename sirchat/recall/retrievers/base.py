"""The base classes of retrievers, and what a retriever sees of a chat.

Settings are checked against their class attributes, so the files of retrievers import torch only
for types and where they compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from sirchat.memory.archive import Archive
    from sirchat.memory.cache import LayerRotation
    from sirchat.memory.key_values import KeyValues, Positions

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
            yield _unrotated_pair(block, 0, self.rotations[layer])

    def query_pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, m, D] of the query in one layer, unrotated."""
        return _unrotated_pair(self.query, layer, self.rotations[layer])


def _unrotated_pair(block: KeyValues, layer: int, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    import torch

    from sirchat.memory.rope import unrotated

    written_at = torch.from_numpy(block.written_at)
    keys, values = block.tensors[2 * layer : 2 * layer + 2]
    return (
        unrotated(keys, written_at, rotation.key),
        unrotated(values, written_at, rotation.value),
    )


class Retriever(ABC):
    """Scores archived tokens for a turn; those with the highest scores are restored.

    A retriever has no state. The first line of its docstring is shown to users as help.
    """

    needs_turn: ClassVar[bool] = True  # reads the turn before the search, for its keys and values
    finds_passages: ClassVar[bool] = False  # scores passages, not tokens
    takes_weight: ClassVar[bool] = True  # whether the setting `recall_weight` applies

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """The scores of n archived tokens: [layers, n], or [1, n] for all layers."""


class SimilarityRetriever(Retriever):
    """Scores archived tokens by the similarity of their keys and values to those of the new turn.

    Equations (1) to (3) of Retrieval-Augmented StreamingLLM. The similarity is the mean of inner
    products over keys, values and heads, without rotary positions.
    """

    cosine: ClassVar[bool] = True  # scale vectors to length 1 first
    mean: ClassVar[bool] = True  # compare with the turn's mean key and value, not with each token's

    def score(self, candidates: Candidates) -> Tensor:
        import torch

        layers = range(len(candidates.rotations))
        return torch.stack([self._of_layer(candidates, layer) for layer in layers]).cpu()

    def _of_layer(self, candidates: Candidates, layer: int) -> Tensor:
        """The float32 scores [n] of n archived tokens in layer number `layer`."""
        import torch

        unit = partial(torch.nn.functional.normalize, dim=-1) if self.cosine else torch.as_tensor
        sought = list(candidates.query_pair(layer))
        if self.mean:
            sought = [vectors.mean(-2, keepdim=True) for vectors in sought]
        sought = [unit(vectors) for vectors in sought]
        scores = []
        for pair in candidates.pairs(layer):
            of_keys, of_values = (
                unit(rows) @ vectors.to(rows.device).mT
                for rows, vectors in zip(pair, sought, strict=True)
            )  # [H, k, m] each
            scores.append(((of_keys + of_values).mean(0) / 2).amax(1))  # [k]
        return torch.cat(scores)


class PassageRetriever(Retriever):
    """Finds passages; `recall.passage_search` scores them. The model reads nothing to search."""

    needs_turn = False
    finds_passages = True
    takes_weight = False
    by_meaning: ClassVar[bool] = False  # if the model has an encoder

    def score(self, candidates: Candidates) -> Tensor:
        raise NotImplementedError("passages are scored, not tokens")
