"""Recall: score archived rows for a turn, and choose the rows to bring back.

The measures of Retrieval-Augmented StreamingLLM, equations (1) to (3), compare keys and values as
first written, with the rotary position undone, so that distance in the conversation plays no part:

- `cosine-pairwise` (1): 1/2 (cos(k_i, k_j) + cos(v_i, v_j)), the maximum over the query's rows j;
- `cosine` (2) and `mips` (3): the same with the query's mean key and mean value; `mips` takes
  inner products instead of cosines.

Vectors are compared head by head, and the heads averaged. `attention` is not from the paper: the
weight that the turn's queries would give to a row in a softmax(q k / sqrt(d)) over the archive
alone, the maximum over the turn's tokens, the mean over heads. `random` chooses rows at random, as
a baseline. `bm25` and `hybrid` score whole turns; see `turnwise`.

With scope `token` the layers' scores are averaged and all layers recall the same rows; with `layer`
each layer recalls its own, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.cache import LayerRotation
from sirchat.memory.rope import Rotation
from sirchat.memory.segments import Positions, Rows

Measure = Literal["mips", "cosine", "cosine-pairwise", "attention", "bm25", "hybrid", "random"]
Weight = Literal["none", "surprisal"]
Scope = Literal["token", "layer"]

BY_TURN: frozenset[Measure] = frozenset({"bm25", "hybrid"})
"""The measures that score whole turns, by their words; `weight` and `soft` are for the others."""

Blocks = Callable[[], Iterator[Rows]]
"""Each call iterates over all candidate rows, block by block, always in the same order."""


@dataclass(frozen=True)
class RecallSettings:
    """How archived rows are brought back for a turn.

    Attributes:
        measure: how a row is scored.
        weight: `surprisal` multiplies a row's score above the lowest one by the token's surprisal
            in nats; not under `random`, `bm25` and `hybrid`.
        n: most rows to bring back; as many cache slots are reserved for them.
        soft: under `attention`, take the square root of each score and share it with the rows
            before and after.
        span: neighbours on each side of a hit that are brought back with it, counted within n.
        scope: the same rows for all layers, or different ones for each layer.
        query: what archived rows are compared with: the rows of the turn, which is read once to
            search, or the recent window before it, as in the paper.
        index: whether candidates come from a search index; `auto`: above `AUTO_INDEX_ROWS` rows,
            where faiss is installed.
    """

    measure: Measure
    weight: Weight = "none"
    n: int = 200
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
        scale: the factor on q k in the layer's softmax.
        heads: number of key heads in the attention call.
    """

    queries: Tensor
    scale: float
    heads: int

    def match(self, keys: Tensor) -> bool:
        """Whether cached keys [H, n, D] have the heads and dimensions of the attended keys."""
        return (self.heads, self.queries.shape[-1]) == (keys.shape[0], keys.shape[-1])


@dataclass(frozen=True)
class Query:
    """What archived rows are scored against: the turn's rows and the turn's queries.

    Attributes:
        rows: the turn's rows, as first written.
        layer_queries: one entry per layer, where queries were recorded.
    """

    rows: Rows
    layer_queries: Sequence[LayerQueries] = ()

    def of_layer(self, layer: int) -> LayerQueries:
        """The queries of a layer; raises LookupError if none match the cached keys."""
        keys = self.rows.tensors[2 * layer]
        if layer >= len(self.layer_queries) or not self.layer_queries[layer].match(keys):
            raise LookupError("this model's cached keys are not what its queries look for")
        return self.layer_queries[layer]


def score(
    measure: Measure,
    query: Query,
    blocks: Blocks,
    rotations: Sequence[LayerRotation],
    shares: Tensor | None = None,
) -> Tensor:
    """The candidates' scores [layers, n], float32, in the order of `blocks`.

    `shares` [n] says how many archived rows each candidate stands for, where only a sample of them
    is given: the softmax of `attention` is over all rows.

    Raises LookupError when `attention` has no queries that match the cached keys.
    """
    layers = [
        _attention(query.of_layer(layer), _pairs(layer, blocks, rotation), shares)
        if measure == "attention"
        else _similarity(measure, query, layer, blocks, rotation)
        for layer, rotation in enumerate(rotations)
    ]
    return torch.stack(layers).cpu()


def weighted(scores: Tensor, surprisal: NDArray[np.float64]) -> Tensor:
    """Scores [layers, n] less each layer's lowest, times surprisal [n] in nats."""
    lowest = scores.min(dim=1, keepdim=True).values
    return (scores - lowest) * torch.from_numpy(surprisal).to(scores.dtype)


def softened(scores: Tensor, positions: Positions) -> Tensor:
    """The square roots of scores [layers, n] less each layer's lowest, smoothed along the stream.

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
    """At most n positions, ascending, with the highest scores [k]; of equal scores, the newer.

    With each hit come the candidates up to `span` positions before and after it, nearest first,
    until n are chosen.
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


def _pairs(layer: int, blocks: Blocks, rotation: LayerRotation) -> Iterator[tuple[Tensor, Tensor]]:
    """A layer's unrotated keys and values, [H, k, D] each, block by block."""
    for block in blocks():
        yield pair(layer, block, rotation)


def pair(layer: int, rows: Rows, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    """A layer's keys and values [H, k, D], with the rotary position undone."""
    written_at = torch.from_numpy(rows.written_at)
    key, value = rows.tensors[2 * layer : 2 * layer + 2]
    keys = unrotated(key, written_at, rotation.key)
    return keys, unrotated(value, written_at, rotation.value)


def _similarity(
    measure: Measure, query: Query, layer: int, blocks: Blocks, rotation: LayerRotation
) -> Tensor:
    """Equations (1) to (3) for one layer: [n]."""
    wanted = pair(layer, query.rows, rotation)
    if measure != "cosine-pairwise":
        wanted = (wanted[0].mean(1, keepdim=True), wanted[1].mean(1, keepdim=True))  # [H, 1, D]
    if measure != "mips":
        wanted = (unit(wanted[0]), unit(wanted[1]))
    scores = []
    for candidates in _pairs(layer, blocks, rotation):
        if measure != "mips":
            candidates = (unit(candidates[0]), unit(candidates[1]))
        of_keys, of_values = (
            rows @ sought.to(rows.device).mT
            for rows, sought in zip(candidates, wanted, strict=True)
        )  # [H, k, m] each
        similarity = (of_keys + of_values).mean(0) / 2  # [k, m]
        scores.append(similarity.amax(1))
    return torch.cat(scores)


def _attention(
    layer_queries: LayerQueries, pairs: Iterator[tuple[Tensor, Tensor]], shares: Tensor | None
) -> Tensor:
    """Softmax over all rows for each query, the turn's maximum, the heads' mean: [n]."""
    blocks = []
    for keys, _ in pairs:
        heads, _, dims = keys.shape
        queries = layer_queries.queries.to(keys.device).reshape(
            heads, -1, dims
        )  # [H, group x m, D]
        blocks.append(queries @ keys.mT * layer_queries.scale)  # [H, group x m, k]
    logits = torch.cat(blocks, dim=2)
    if shares is not None:
        shares = shares.to(logits.device)
        logits += shares.log()  # a row that stands for s rows enters the softmax's sum s times
    weights = logits.softmax(-1)
    by_head = weights.reshape(len(weights), -1, layer_queries.queries.shape[1], weights.shape[2])
    scores: Tensor = by_head.amax(2).mean((0, 1))  # of [H, group, m, n]
    return scores if shares is None else scores / shares


def unit(x: Tensor) -> Tensor:
    """Vectors [..., D] of length 1 in the same directions."""
    return torch.nn.functional.normalize(x, dim=-1)
