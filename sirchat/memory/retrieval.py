"""What recall compares archived rows with, and which of the scored rows it chooses.

The folder `recall` has the ways to score rows: one file for each retriever. With scope `token` the
layers' scores are averaged, and all layers recall the same rows; with scope `layer` each layer
recalls its own rows, as in the code of Retrieval-Augmented StreamingLLM.
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
    """How archived rows are restored for a turn.

    Attributes:
        retriever: name of the retriever that scores the rows.
        weight: with `surprisal`, a row's score minus the lowest score is multiplied by the token's
            surprisal in nats, if the retriever takes weights.
        n: maximum number of rows to restore; as many cache slots are reserved for them. None: as
            many as suit the budget.
        soft: take the square root of each score and share it with the rows before and after, if
            the retriever allows this.
        span: neighbours on each side of a hit that are restored with it, counted within n.
        scope: `token` restores the same rows for all layers; `layer` chooses for each layer anew.
        query: what archived rows are compared with. `turn`: the rows of the turn, which is read
            once for the search; `recent`: the recent window before the turn, as in the paper.
        index: whether candidates come from a search index; `auto`: only if there are more than
            `AUTO_INDEX_ROWS` rows and faiss is installed.
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
    """The query vectors of one layer.

    Attributes:
        queries: [H_q, m, D], with the rotary position undone.
        scale: factor by which q k is multiplied before the layer's softmax.
        heads: number of key heads in the attention call.
    """

    queries: Tensor
    scale: float
    heads: int

    def match(self, keys: Tensor) -> bool:
        """Whether cached keys [H, n, D] have as many heads and dimensions as the queries need."""
        return (self.heads, self.queries.shape[-1]) == (keys.shape[0], keys.shape[-1])


@dataclass(frozen=True)
class Query:
    """What archived rows are compared with.

    Attributes:
        rows: rows [m] of the turn or of the recent window, as first written; none if not needed.
        layer_queries: one entry per layer, where queries were recorded.
        of_template: mask [m] of the rows that are tokens of the chat template.
        words: a score for each turn so far, by the words that it shares with the new turn.
        start: stream position of the turn's first token.
    """

    rows: Rows
    layer_queries: Sequence[LayerQueries] = ()
    of_template: NDArray[np.bool_] | None = None
    words: NDArray[np.float64] | None = None
    start: int = 0

    def of_layer(self, layer: int) -> LayerQueries:
        """The queries of a layer; raises LookupError if none match the cached keys."""
        keys = self.rows.tensors[2 * layer]
        if layer >= len(self.layer_queries) or not self.layer_queries[layer].match(keys):
            raise LookupError("this model's queries cannot be compared with its KV cache")
        return self.layer_queries[layer]


@dataclass(frozen=True)
class Candidates:
    """The archived rows that a retriever scores for a turn.

    Attributes:
        archive: where the rows are stored.
        positions: their stream positions [n], ascending.
        query: what the rows are compared with.
        rotations: one entry per layer of the model.
        ledger: what is known of each token; None where only keys and values are compared.
        counts: how many archived rows each candidate represents [n], if some are a sample; None
            if each represents itself alone.
        fetched: the rows, if they were fetched already.
    """

    archive: Archive
    positions: Positions
    query: Query
    rotations: Sequence[LayerRotation]
    ledger: Ledger | None = None
    counts: Tensor | None = None
    fetched: Rows | None = None

    def pairs(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A layer's keys and values [H, k, D], with the rotary position undone, block by block."""
        if self.fetched is not None:
            yield pair(layer, self.fetched, self.rotations[layer])
            return
        for rows in self._blocks(layer):
            yield pair(0, rows, self.rotations[layer])

    def keys(self, layer: int) -> Iterator[Tensor]:
        """A layer's keys [H, k, D], with the rotary position undone, block by block."""
        for rows in self._blocks(layer):
            yield unrotated_keys(0, rows, self.rotations[layer])

    @property
    def words(self) -> NDArray[np.float64]:
        """A score for each turn so far, by the words that it shares with the new turn."""
        if self.query.words is None:
            raise ValueError("this retriever needs a score for each turn by its words")
        return self.query.words

    @property
    def turns(self) -> NDArray[np.int64]:
        """The turn number [n] of each row."""
        turns: NDArray[np.int64] = self._column("turn")
        return turns

    @property
    def of_template(self) -> NDArray[np.bool_]:
        """Mask [n] of the rows that are tokens of the chat template."""
        mask: NDArray[np.bool_] = self._column("role") == Role.TEMPLATE
        return mask

    def random_numbers(self) -> NDArray[np.float64]:
        """A random number in [0, 1) for each row [n]; the same turn always gives the same."""
        if self.ledger is None:
            raise ValueError("random numbers need a ledger")
        return uniform(self.ledger.seed, Purpose.RECALL, self.positions, self.query.start)

    def _column(self, name: str) -> NDArray[Any]:
        if self.ledger is None:
            raise ValueError(f"a row's {name} needs a ledger")
        return self.ledger.column(name)[self.positions]

    def _blocks(self, layer: int) -> Iterator[Rows]:
        for start in range(0, len(self.positions), _BATCH):
            yield self.archive.fetch(self.positions[start : start + _BATCH], layer)


def weighted(scores: Tensor, surprisal: NDArray[np.float64]) -> Tensor:
    """Scores [layers, n] minus each layer's lowest score, times surprisal [n] in nats."""
    lowest = scores.min(dim=1, keepdim=True).values
    return (scores - lowest) * torch.from_numpy(surprisal).to(scores.dtype)


def softened(scores: Tensor, positions: Positions) -> Tensor:
    """Square roots of scores [layers, n] minus each layer's lowest, smoothed along the stream.

    `positions` [n] are ascending. A row gets half of its own root and a quarter of each of the
    roots right before and after it in the stream: the answer often stands beside the token that the
    queries match. The root keeps a few rows with very high weights from deciding alone.
    """
    roots = (scores - scores.min(dim=1, keepdim=True).values).sqrt()
    adjacent = torch.from_numpy(np.diff(positions) == 1).to(roots)  # [n - 1]
    smoothed = roots / 2
    smoothed[:, 1:] += roots[:, :-1] * adjacent / 4
    smoothed[:, :-1] += roots[:, 1:] * adjacent / 4
    return smoothed


def choose(scores: Tensor, positions: Positions, n: int, span: int = 0) -> Positions:
    """At most n of the `positions` [k], ascending: those with the highest scores; newer win ties.

    With each hit, the candidates up to `span` positions before and after it are chosen, too,
    nearest first, until n are chosen.
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
    """Rows [H, k, D], first written at rotary positions `written_at` [k], rotated to position 0.

    The result is float32.
    """
    if rotation is None:
        return rows.float()
    slots = int(written_at.max()) + 1 if len(written_at) else 0
    cos, sin = rotation.cos_sin(torch.arange(slots), torch.zeros(slots, dtype=torch.int64))
    return rotation.apply(rows, cos[written_at], sin[written_at])


def unrotated_keys(layer: int, rows: Rows, rotation: LayerRotation) -> Tensor:
    """A layer's keys [H, k, D], with the rotary position undone."""
    return unrotated(rows.tensors[2 * layer], torch.from_numpy(rows.written_at), rotation.key)


def pair(layer: int, rows: Rows, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    """A layer's keys and values [H, k, D], with the rotary position undone."""
    values = rows.tensors[2 * layer + 1]
    written_at = torch.from_numpy(rows.written_at)
    return unrotated_keys(layer, rows, rotation), unrotated(values, written_at, rotation.value)
