"""Which archived rows to bring back: how much each resembles, or is attended to by, what is said.

The measures of Retrieval-Augmented StreamingLLM, equations (1) to (3), over keys and values as
first written, their rotation taken back, so that distance in the conversation plays no part:

- `cosine-pairwise` (1): 1/2 (cos(k_i, k_j) + cos(v_i, v_j)), the maximum over the query's rows j;
- `cosine` (2) and `mips` (3): the same with the query's mean key and mean value; `mips` takes
  inner products instead of cosines.

A head's vectors are compared with each other, and the heads averaged. `attention` is ours: what the
turn's own queries would attend to if the archive were all there is, softmax(q k / sqrt(d)), the
maximum over the turn, the mean over heads. `random` is a choice by lot, to compare with.

With scope `token` the layers' scores are averaged and one choice serves all; with `layer` each has
its own, as in the paper's code.
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

Measure = Literal["mips", "cosine", "cosine-pairwise", "attention", "random"]
Weight = Literal["none", "surprisal"]
Scope = Literal["token", "layer"]

Blocks = Callable[[], Iterator[Rows]]
"""Goes over the candidates once, block by block, always in the same order."""


@dataclass(frozen=True)
class RecallSettings:
    """How archived rows are brought back for a turn.

    Attributes:
        measure: what a row's score is.
        weight: `surprisal` multiplies the score, counted from the lowest one, by how much the token
            told when it was read.
        n: rows that may come back, a reserve beside what the policy holds.
        soft: under `attention`, take the root of each score and share it with the neighbours.
        span: neighbours on each side of a hit that come along, within the n.
        scope: one choice for all layers, or one for each.
        query: the rows of the turn, read once to search; or the recent window before it (the
            paper's).
        index: whether candidates come from an index: `auto` where there are many rows and faiss is
            installed.
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
    """A layer's queries: [H_q, m, D], rotation taken back, with the factor of its softmax.

    `heads` is how many heads the keys had that they were compared with.
    """

    queries: Tensor
    scale: float
    heads: int

    def fits(self, keys: Tensor) -> bool:
        """Whether cached keys [H, n, D] are such as these queries look for."""
        return (self.heads, self.queries.shape[-1]) == (keys.shape[0], keys.shape[-1])


@dataclass(frozen=True)
class Query:
    """What is looked for: rows as first written, and what their layers asked, if it was heard."""

    rows: Rows
    heard: Sequence[LayerQueries] = ()

    def asked(self, layer: int) -> LayerQueries:
        """What a layer asked; LookupError where that can't be compared with what is cached."""
        keys = self.rows.tensors[2 * layer]
        if layer >= len(self.heard) or not self.heard[layer].fits(keys):
            raise LookupError("this model's cached keys are not what its queries look for")
        return self.heard[layer]


def score(
    measure: Measure,
    query: Query,
    blocks: Blocks,
    rotations: Sequence[LayerRotation],
    shares: Tensor | None = None,
) -> Tensor:
    """The candidates' scores [layers, n], float32, in the order of `blocks`.

    `shares` [n] tells how many rows each stands for, where not all rows are candidates: the softmax
    of `attention` goes over all.

    Raises LookupError when `attention` has no queries that fit the cached keys.
    """
    layers = [
        _attention(query.asked(layer), _pairs(layer, blocks, rotation), shares)
        if measure == "attention"
        else _similarity(measure, query, layer, blocks, rotation)
        for layer, rotation in enumerate(rotations)
    ]
    return torch.stack(layers).cpu()


def weighted(scores: Tensor, surprisal: NDArray[np.float64]) -> Tensor:
    """Scores [layers, n], counted from each layer's lowest, times surprisal [n] in nats."""
    lowest = scores.min(dim=1, keepdim=True).values
    return (scores - lowest) * torch.from_numpy(surprisal).to(scores.dtype)


def softened(scores: Tensor, positions: Positions) -> Tensor:
    """The root of scores [layers, n], counted from each layer's lowest, shared with neighbours.

    A token at `positions` [n], ascending, keeps half of its own, and takes a quarter of those of
    the tokens right before and after it in the stream. What a turn looks for stands beside what its
    queries find; and few rows that they find at once should not decide alone.
    """
    roots = (scores - scores.min(dim=1, keepdim=True).values).sqrt()
    beside = torch.from_numpy(np.diff(positions) == 1).to(roots)  # [n - 1]
    shared = roots / 2
    shared[:, 1:] += roots[:, :-1] * beside / 4
    shared[:, :-1] += roots[:, 1:] * beside / 4
    return shared


def choose(scores: Tensor, positions: Positions, n: int, span: int = 0) -> Positions:
    """The positions [at most n], ascending, of the highest scores [k]; of equals, the newer.

    Each hit takes the candidates up to `span` places before and after it along, until n are taken.
    """
    newest_first = torch.argsort(scores.flip(0), descending=True, stable=True)
    order = positions[len(positions) - 1 - newest_first.numpy()]
    if not span:
        return np.sort(order[:n])
    known, taken = set(positions.tolist()), dict[int, None]()
    for hit in order.tolist():
        for near in sorted(range(hit - span, hit + span + 1), key=lambda at: abs(at - hit)):
            if near in known and len(taken) < n:
                taken[near] = None
        if len(taken) >= n:
            break
    return np.sort(np.fromiter(taken, np.int64, len(taken)))


def unrotated(rows: Tensor, written_at: Tensor, rotation: Rotation | None) -> Tensor:
    """`rows` [H, k, D] as they would be at position 0, in float32."""
    if rotation is None:
        return rows.float()
    slots = int(written_at.max()) + 1 if len(written_at) else 0
    cos, sin = rotation.turn(torch.arange(slots), torch.zeros(slots, dtype=torch.int64))
    return rotation.apply(rows, cos[written_at], sin[written_at])


def _pairs(layer: int, blocks: Blocks, rotation: LayerRotation) -> Iterator[tuple[Tensor, Tensor]]:
    """A layer's unrotated keys and values, [H, k, D] each, block by block."""
    for block in blocks():
        yield pair(layer, block, rotation)


def pair(layer: int, rows: Rows, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    """A layer's keys and values [H, k, D], rotation taken back."""
    written_at = torch.from_numpy(rows.written_at)
    key, value = rows.tensors[2 * layer : 2 * layer + 2]
    keys = unrotated(key, written_at, rotation.key)
    return keys, unrotated(value, written_at, rotation.value)


def _similarity(
    measure: Measure, query: Query, layer: int, blocks: Blocks, rotation: LayerRotation
) -> Tensor:
    """Equations (1) to (3) for one layer: [n]."""
    ours = pair(layer, query.rows, rotation)
    if measure != "cosine-pairwise":
        ours = (ours[0].mean(1, keepdim=True), ours[1].mean(1, keepdim=True))  # [H, 1, D]
    if measure != "mips":
        ours = (unit(ours[0]), unit(ours[1]))
    found = []
    for theirs in _pairs(layer, blocks, rotation):
        if measure != "mips":
            theirs = (unit(theirs[0]), unit(theirs[1]))
        both = [their @ our.to(their.device).mT for their, our in zip(theirs, ours, strict=True)]
        alike = (both[0] + both[1]).mean(0) / 2  # [k, m]
        found.append(alike.amax(1))
    return torch.cat(found)


def _attention(
    heard: LayerQueries, pairs: Iterator[tuple[Tensor, Tensor]], shares: Tensor | None
) -> Tensor:
    """Softmax over all rows for each query, the turn's maximum, the heads' mean: [n]."""
    logits = []
    for keys, _ in pairs:
        heads, _, dims = keys.shape
        queries = heard.queries.to(keys.device).reshape(heads, -1, dims)  # [H, group x m, D]
        logits.append(queries @ keys.mT * heard.scale)  # [H, group x m, k]
    together = torch.cat(logits, dim=2)
    if shares is not None:
        shares = shares.to(together.device)
        together += shares.log()  # a row that stands for many counts as often in the sum
    weights = together.softmax(-1)
    by_head = weights.reshape(len(weights), -1, heard.queries.shape[1], weights.shape[2])
    found: Tensor = by_head.amax(2).mean((0, 1))  # of [H, group, m, n]
    return found if shares is None else found / shares


def unit(x: Tensor) -> Tensor:
    """Vectors [..., D] of length 1 in the same directions."""
    return torch.nn.functional.normalize(x, dim=-1)
