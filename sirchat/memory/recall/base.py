"""What a retriever is: it scores archived rows for a turn, and says what it needs to do so.

Settings are checked against a retriever's needs, also by commands that load no model. So these
modules import torch only for types, or where something is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from sirchat.memory.retrieval import Candidates


class Retriever(ABC):
    """Scores archived rows for a turn; has no state. A docstring's first line is shown as help.

    Class attributes:
        needs_turn: whether the turn is read once to search, for its keys and values. (Reading it
            may evict rows; the search can find the evicted rows, too.)
        needs_queries: whether the turn's query vectors are recorded when it is read.
        needs_words: whether it needs a score for each turn, by words shared with the new turn.
        wide_words: whether that score also counts pairs of words and words of similar meaning.
        index_probes: number of lists that are visited in a search index; 0 if it can't use one.
            (A retriever that uses one must need queries, or be a `SimilarityRetriever`.)
        takes_weight: whether `recall_weight` applies to its scores.
        takes_soft: whether `recall_soft` applies to its scores.
    """

    needs_turn: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = False
    needs_words: ClassVar[bool] = False
    wide_words: ClassVar[bool] = False
    index_probes: ClassVar[int] = 0
    takes_weight: ClassVar[bool] = True
    takes_soft: ClassVar[bool] = False

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """Scores of the candidates, [layers, n], or [1, n] where all layers have the same.

        Raises LookupError if the model can't give what the retriever needs.
        """


class LayerRetriever(Retriever):
    """A retriever that scores each layer's keys and values separately."""

    def score(self, candidates: Candidates) -> Tensor:
        import torch

        layers = range(len(candidates.rotations))
        return torch.stack([self.score_layer(candidates, layer) for layer in layers]).cpu()

    @abstractmethod
    def score_layer(self, candidates: Candidates, layer: int) -> Tensor:
        """Scores of the candidates in one layer, [n], float32."""


class SimilarityRetriever(LayerRetriever):
    """Similarity of keys and values: equations (1) to (3) of Retrieval-Augmented StreamingLLM.

    Keys and values are compared as first written, with the rotary position undone, so that
    distance in the conversation plays no part. Vectors are compared head by head: inner products
    are averaged over keys, values and heads, and the score is their maximum over the turn's tokens.

    Class attributes:
        cosine: whether vectors are first scaled to length 1.
        mean: True to compare rows with the turn's mean key and value; False: with every token's.
    """

    cosine: ClassVar[bool] = True
    mean: ClassVar[bool] = True

    def score_layer(self, candidates: Candidates, layer: int) -> Tensor:
        import torch

        from sirchat.memory.retrieval import pair

        asked = pair(layer, candidates.query.rows, candidates.rotations[layer])
        wanted = self.vectors_of_query(*asked)
        scores = []
        for keys, values in candidates.pairs(layer):
            of_keys, of_values = (
                rows @ sought.to(rows.device).mT
                for rows, sought in zip(self.vectors(keys, values), wanted, strict=True)
            )  # [H, k, m] each
            scores.append(((of_keys + of_values).mean(0) / 2).amax(1))  # [k]
        return torch.cat(scores)

    def vectors(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., D] as they are compared."""
        return (unit(keys), unit(values)) if self.cosine else (keys, values)

    def vectors_of_query(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The turn's keys and values [..., m, D] as they are compared; m = 1 for their mean."""
        if self.mean:
            keys, values = keys.mean(-2, keepdim=True), values.mean(-2, keepdim=True)
        return self.vectors(keys, values)


class TurnRetriever(Retriever):
    """A retriever that scores whole turns: all rows of a turn get the turn's score."""

    needs_words = True
    takes_weight = False

    def score(self, candidates: Candidates) -> Tensor:
        """Give each row its turn's score, and each chat template token a score below all others.

        Template tokens carry no content, and are a sixth of a short turn.
        """
        import torch

        scores = torch.from_numpy(self.score_turns(candidates)[candidates.turns])
        scores[torch.from_numpy(candidates.of_template)] = float(scores.min()) - 1
        return scores[None]

    @abstractmethod
    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        """A score for each turn of the conversation."""


class WordRetriever(TurnRetriever):
    """A retriever that scores turns by words alone: nothing is read to search."""

    needs_turn = False

    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        return self.score_words(candidates.words)

    @abstractmethod
    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        """A score [n] for each turn, from the scores [n] by the words shared with the new turn."""


_SHORTEST = 1e-12  # so that a zero vector stays a zero vector

NEIGHBOUR = 0.5
"""Part of a turn's score that is added to each of the two turns beside it."""


def with_neighbours(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores [n] of consecutive turns; each gets a part of the scores of the turns beside it."""
    shared = scores.copy()
    shared[1:] += NEIGHBOUR * scores[:-1]
    shared[:-1] += NEIGHBOUR * scores[1:]
    return shared


def unit(vectors: Tensor) -> Tensor:
    """The vectors [..., D], scaled to length 1."""
    length: Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / length.clamp_min(_SHORTEST)
