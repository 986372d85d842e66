"""The data that retrievers use to score archived tokens, and the choice of the best tokens.

Recall restores archived tokens (rows) to the cache for one turn. A retriever scores the tokens;
each retriever is in a file of the folder `recall`. With the setting `scope: token`, the scores of
all layers are averaged, and all layers get the same tokens. With `scope: layer`, each layer gets
the tokens with its own highest scores, as in the code of Retrieval-Augmented StreamingLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.ledger import Ledger, Role
from sirchat.memory.random_numbers import Purpose, uniform
from sirchat.memory.rope import Rotation
from sirchat.memory.segments import Positions, Rows

if TYPE_CHECKING:
    from sirchat.memory.archive import Archive

Weight = Literal["none", "surprisal"]
Scope = Literal["token", "layer"]

_BATCH = 8_192  # rows fetched at once


@dataclass(frozen=True)
class RecallSettings:
    """Settings of recall: how archived tokens (rows) are chosen and restored for a turn.

    Attributes:
        retriever: name of the retriever that scores the rows.
        weight: with `surprisal`, a row's score minus the lowest score is multiplied by the token's
            surprisal in nats, if the retriever allows this.
        n: maximum number of rows to restore, neighbours included; as many cache rows are reserved.
            None: the number depends on the budget.
        soft: take the square root of each score and average it with the roots of the rows right
            before and after, if the retriever allows this.
        span: number of neighbours, on each side of a chosen row, that are restored with it.
        scope: `token` restores the same rows in all layers; `layer` chooses rows for each layer.
        query: the tokens with which archived rows are compared. `turn`: those of the new turn,
            which is read once more for the search; `recent`: the newest tokens before the turn, as
            in the paper.
        index: whether a search index proposes the rows to score; `auto`: only if more than
            `AUTO_INDEX_ROWS` rows are archived and faiss is installed.
    """

    retriever: str
    weight: Weight = "none"
    n: int | None = None
    soft: bool = False
    span: int = 0
    scope: Scope = "token"
    query: Literal["turn", "recent"] = "turn"
    index: Literal["auto", "on", "off"] = "off"


@dataclass(frozen=True)
class LayerQueries:
    """The attention query vectors that one layer computed for the tokens of a turn.

    Attributes:
        queries: [H_q, m, D] for m tokens, with the rotary position undone.
        scale: factor by which the product of query and key is multiplied before the softmax.
        heads: number of key heads of the layer.
    """

    queries: Tensor
    scale: float
    heads: int

    def match(self, keys: Tensor) -> bool:
        """Whether the query vectors can be compared with cached `keys` [H, n, D].

        They can if the numbers of key heads and of dimensions are equal.
        """
        return (self.heads, self.queries.shape[-1]) == (keys.shape[0], keys.shape[-1])


@dataclass(frozen=True)
class Query:
    """The m tokens with which a search compares archived tokens: usually those of the new turn.

    Attributes:
        rows: keys and values of m tokens, of the new turn or of the newest tokens before it; empty
            if the retriever does not need them.
        layer_queries: the turn's query vectors, one entry per layer; empty if not recorded.
        of_template: mask [m] of the tokens of the chat template; None if they are not known.
        words: a score for each earlier turn, by the words that it shares with the new turn; None
            if the retriever does not need them.
        start: stream position of the new turn's first token.
    """

    rows: Rows
    layer_queries: Sequence[LayerQueries] = ()
    of_template: NDArray[np.bool_] | None = None
    words: NDArray[np.float64] | None = None
    start: int = 0

    def of_layer(self, layer: int) -> LayerQueries:
        """The query vectors that the layer with this number computed for the new turn.

        Raises LookupError if no query vectors were recorded for the layer, or if they can't be
        compared with the cached keys.
        """
        keys = self.rows.tensors[2 * layer]
        if layer >= len(self.layer_queries) or not self.layer_queries[layer].match(keys):
            raise LookupError("this model's queries cannot be compared with its KV cache")
        return self.layer_queries[layer]


@dataclass(frozen=True)
class Candidates:
    """The n archived tokens (rows) that a retriever scores for a turn.

    Attributes:
        archive: the archive with the candidates' keys and values.
        positions: the candidates' stream positions [n], ascending.
        query: the tokens with which the candidates are compared.
        rotations: rotary position embedding of each layer of the model.
        ledger: the table of all tokens; may be None where only keys and values are compared.
        counts: [n], how many archived rows each candidate represents, if some candidates are a
            sample; None if each candidate represents only itself.
        fetched: the candidates' keys and values; None if they must be read from the archive.
    """

    archive: Archive
    positions: Positions
    query: Query
    rotations: Sequence[LayerRotation]
    ledger: Ledger | None = None
    counts: Tensor | None = None
    fetched: Rows | None = None

    def pairs(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the candidates' keys and values in one layer, in blocks of k candidates.

        A block is a pair of tensors [H, k, D] with the rotary positions undone.
        """
        if self.fetched is not None:
            yield pair(layer, self.fetched, self.rotations[layer])
            return
        for rows in self._blocks(layer):
            yield pair(0, rows, self.rotations[layer])

    def keys(self, layer: int) -> Iterator[Tensor]:
        """Yield the candidates' keys in one layer, in blocks [H, k, D] of k candidates.

        The keys' rotary positions are undone.
        """
        for rows in self._blocks(layer):
            yield unrotated_keys(0, rows, self.rotations[layer])

    @property
    def words(self) -> NDArray[np.float64]:
        """A score for each earlier turn, by the words that it shares with the new turn."""
        if self.query.words is None:
            raise ValueError("this retriever needs a score for each turn by its words")
        return self.query.words

    @property
    def turns(self) -> NDArray[np.int64]:
        """The number of each candidate's turn [n]."""
        turns: NDArray[np.int64] = self._column("turn")
        return turns

    @property
    def of_template(self) -> NDArray[np.bool_]:
        """Mask [n] of the candidates that are tokens of the chat template."""
        mask: NDArray[np.bool_] = self._column("role") == Role.TEMPLATE
        return mask

    def random_numbers(self) -> NDArray[np.float64]:
        """A random number in [0, 1) for each candidate [n].

        The same candidates get the same numbers for the same turn.
        """
        if self.ledger is None:
            raise ValueError("random scores are drawn from the ledger's seed: pass `ledger`")
        return uniform(self.ledger.seed, Purpose.RECALL, self.positions, self.query.start)

    def _column(self, name: str) -> NDArray[Any]:
        if self.ledger is None:
            raise ValueError(f"a row's {name} needs a ledger")
        return self.ledger.column(name)[self.positions]

    def _blocks(self, layer: int) -> Iterator[Rows]:
        for start in range(0, len(self.positions), _BATCH):
            yield self.archive.fetch(self.positions[start : start + _BATCH], layer)


def weighted(scores: Tensor, surprisal: NDArray[np.float64]) -> Tensor:
    """Weight the scores [layers, n] of n tokens by the tokens' `surprisal` [n], in nats.

    Each layer's lowest score is subtracted from its scores before they are multiplied.
    """
    lowest = scores.min(dim=1, keepdim=True).values
    return (scores - lowest) * torch.from_numpy(surprisal).to(scores.dtype)


def softened(scores: Tensor, positions: Positions) -> Tensor:
    """Make the scores [layers, n] of n tokens more even: average their square roots.

    Each layer's lowest score is subtracted before the root is taken. Then a token gets half of its
    own root, and a quarter of the root of each of the two tokens beside it in the conversation,
    because the answer often stands beside the token that the queries match. Because of the root, a
    few very high scores don't decide alone. `positions` [n] are the tokens' stream positions,
    ascending.
    """
    roots = (scores - scores.min(dim=1, keepdim=True).values).sqrt()
    adjacent = torch.from_numpy(np.diff(positions) == 1).to(roots)  # [n - 1]
    smoothed = roots / 2
    smoothed[:, 1:] += roots[:, :-1] * adjacent / 4
    smoothed[:, :-1] += roots[:, 1:] * adjacent / 4
    return smoothed


def choose(scores: Tensor, positions: Positions, n: int, span: int = 0) -> Positions:
    """Choose at most n tokens: those with the highest scores, and their neighbours.

    `positions` [k] are the tokens' stream positions, `scores` [k] their scores. Of tokens with
    equal scores, the newer one is chosen. The neighbours of a chosen token, at most `span`
    positions before or after it, are chosen with it, the nearest first. Returns the positions of
    the chosen tokens, ascending.
    """
    newest_first = torch.argsort(scores.flip(0), descending=True, stable=True)
    order = positions[len(positions) - 1 - newest_first.numpy()]
    if not span:
        return np.sort(order[:n])
    candidates, chosen = set(positions.tolist()), dict[int, None]()
    for hit in order.tolist():
        for near in sorted(range(hit - span, hit + span + 1), key=lambda at: abs(at - hit)):
            if near in candidates and len(chosen) < n:
                chosen[near] = None
        if len(chosen) >= n:
            break
    return np.sort(np.fromiter(chosen, np.int64, len(chosen)))


def unrotated(rows: Tensor, written_at: Tensor, rotation: Rotation | None) -> Tensor:
    """Undo the rotary positions of keys or values [H, k, D]; returns a float32 copy.

    `written_at` [k] are their rotary positions. If `rotation` is None, nothing is undone.
    """
    if rotation is None:
        return rows.float()
    slots = int(written_at.max()) + 1 if len(written_at) else 0
    cos, sin = rotation.cos_sin(torch.arange(slots), torch.zeros(slots, dtype=torch.int64))
    return rotation.apply(rows, cos[written_at], sin[written_at])


def unrotated_keys(layer: int, rows: Rows, rotation: LayerRotation) -> Tensor:
    """The keys [H, k, D] of `rows` in one layer, as float32, with the rotary positions undone."""
    return unrotated(rows.tensors[2 * layer], torch.from_numpy(rows.written_at), rotation.key)


def pair(layer: int, rows: Rows, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    """The keys and the values of `rows` in one layer, each [H, k, D], as float32.

    The rotary positions are undone.
    """
    values = rows.tensors[2 * layer + 1]
    written_at = torch.from_numpy(rows.written_at)
    return unrotated_keys(layer, rows, rotation), unrotated(values, written_at, rotation.value)
