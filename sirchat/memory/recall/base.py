"""The base classes of retrievers, which score archived tokens (rows) for a turn.

A retriever's class attributes say what it needs. Settings are checked against these attributes,
also by commands that load no model. To keep these commands fast, the modules of retrievers import
torch only for types and inside functions that compute with tensors.
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
    """Scores archived tokens (rows) for a turn; the rows with the highest scores are restored.

    A retriever has no state. The first line of its class's docstring is shown to users as help.

    Class attributes:
        needs_turn: whether the turn is read once before the search, for its keys and values.
            (Reading it may evict rows; the search can find the evicted rows, too.)
        needs_queries: whether the turn's query vectors are recorded when it is read.
        needs_words: whether the retriever needs word scores: for each earlier turn, a score by the
            words that it shares with the new turn.
        wide_words: whether a word score also counts pairs of words and words of similar meaning.
        index_probes: how many lists of a faiss index each query visits; 0 if the retriever can't
            use an index. (Only a retriever that needs queries, or a `SimilarityRetriever`, can.)
        takes_weight: whether the setting `recall_weight` applies to the retriever's scores.
        takes_soft: whether the setting `recall_soft` applies to the retriever's scores.
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
        """Compute the scores of n archived tokens: [layers, n], or [1, n] for all layers.

        Raises LookupError if the model can't provide the queries that the retriever needs.
        """


class LayerRetriever(Retriever):
    """A retriever that scores archived tokens in each layer separately, by keys and values."""

    def score(self, candidates: Candidates) -> Tensor:
        import torch

        layers = range(len(candidates.rotations))
        return torch.stack([self.score_layer(candidates, layer) for layer in layers]).cpu()

    @abstractmethod
    def score_layer(self, candidates: Candidates, layer: int) -> Tensor:
        """Compute the scores [n] of n archived tokens in layer number `layer`, as float32."""


class SimilarityRetriever(LayerRetriever):
    """Scores archived tokens by the similarity of their keys and values to those of the new turn.

    The class attributes select one of the equations (1) to (3) of Retrieval-Augmented StreamingLLM.

    Rotary positions are undone before keys and values are compared, so that the distance between
    tokens has no influence. Vectors are compared head by head: an archived token and a token of the
    turn get the average of the inner products over keys, values and heads. The archived token's
    score is the largest average with any token of the turn.

    Class attributes:
        cosine: whether vectors are first scaled to length 1.
        mean: True to compare archived tokens with the mean key and mean value of the turn; False
            to compare them with the key and value of every token of the turn.
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
        """Prepare keys and values [..., D] for comparison; returns both.

        If the attribute `cosine` is true, they are scaled to length 1.
        """
        return (unit(keys), unit(values)) if self.cosine else (keys, values)

    def vectors_of_query(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare the new turn's keys and values [..., m, D] for comparison; returns both.

        If the attribute `mean` is true, returns their means [..., 1, D] over the turn's m tokens.
        If the attribute `cosine` is true, vectors are scaled to length 1.
        """
        if self.mean:
            keys, values = keys.mean(-2, keepdim=True), values.mean(-2, keepdim=True)
        return self.vectors(keys, values)


class TurnRetriever(Retriever):
    """A retriever that scores whole turns: all archived tokens of a turn get the turn's score."""

    needs_words = True
    takes_weight = False

    def score(self, candidates: Candidates) -> Tensor:
        """Give each archived token the score of its turn; returns scores [1, n] for all layers.

        Tokens of the chat template get a lower score than all other tokens. They have no content,
        but are a sixth of the tokens of a short turn.
        """
        import torch

        scores = torch.from_numpy(self.score_turns(candidates)[candidates.turns])
        scores[torch.from_numpy(candidates.of_template)] = float(scores.min()) - 1
        return scores[None]

    @abstractmethod
    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        """Compute one score for each earlier turn of the conversation."""


class WordRetriever(TurnRetriever):
    """A retriever that scores whole turns by words alone.

    The model does not read the new turn for the search.
    """

    needs_turn = False

    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        return self.score_words(candidates.words)

    @abstractmethod
    def score_words(self, words: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the final scores [n] of all earlier turns from their word scores `words` [n].

        A turn's word score is high if the turn shares many or rare words with the new turn.
        """


_SHORTEST = 1e-12  # minimum length to divide by, so that a zero vector stays a zero vector

NEIGHBOUR = 0.5
"""The fraction of a turn's score that is added to the scores of the turns before and after it."""


def with_neighbours(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores [n] of consecutive turns, each raised by half of its neighbours' scores.

    The neighbours of a turn are the turns right before and after it.
    """
    shared = scores.copy()
    shared[1:] += NEIGHBOUR * scores[:-1]
    shared[:-1] += NEIGHBOUR * scores[1:]
    return shared


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors [..., D] to length 1; a zero vector stays a zero vector."""
    length: Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / length.clamp_min(_SHORTEST)
