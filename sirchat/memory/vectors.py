"""What a row is to an index: vectors whose inner products with a query's are the row's scores.

Under `attention`, one vector for each chosen head: with surprisal s, exp(q k) s = exp(q k + log s),
so the key with log s beside it, and one query for each token and query head; where it is softened,
the root of a score times s is the root of the score times s * s, and s counts twice. Under the
other measures, one vector of all chosen heads' keys and values; (score - lowest) s is the inner
product of that vector times s, with s beside it, and the query with minus the lowest score beside.

Each is projected to the main axes of a sample of rows, so that a row takes at most DIMS numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sirchat.memory.cache import LayerRotation
from sirchat.memory.recall import Query, RecallSettings, pair, unit
from sirchat.memory.segments import Rows

DIMS = 256
"""Numbers of a row in an index, at most."""

_LEAST_DIMS, _STEP = 16, 8  # of one vector; faiss is fast at multiples of 8
_MOST_RAW = 4096  # numbers of the chosen heads' keys and values before they are projected
_LEAST_NATS = 1e-6

Head = tuple[int, int]  # layer, head of its keys


@dataclass(frozen=True)
class Axes:
    """A projection: the mean [D] that is taken off, and the main axes [D, d]."""

    mean: Tensor
    main: Tensor

    @staticmethod
    def of(sample: Tensor, dims: int) -> Axes:
        """The `dims` main axes of vectors [n, D], or all D."""
        mean = sample.mean(0)
        centred = sample - mean
        _, axes = torch.linalg.eigh(centred.T @ centred)  # by rising variance
        return Axes(mean, axes[:, -dims:].contiguous())

    def of_rows(self, rows: Tensor) -> Tensor:
        """Rows [n, D] as [n, d]."""
        return (rows - self.mean) @ self.main


class Vectors:
    """The vectors of rows and of queries under one measure and weight.

    Args:
        recall: measure and weight.
        rotations: of the model's layers.
        like: rows of the same model.
    """

    def __init__(
        self, recall: RecallSettings, rotations: Sequence[LayerRotation], like: Rows
    ) -> None:
        self._measure = recall.measure
        self._weighs = recall.weight == "surprisal"
        self._power = 2.0 if recall.soft else 1.0  # of the surprisal
        self._rotations = rotations
        shapes = [like.tensors[2 * n].shape for n in range(len(rotations))]
        every = [(layer, head) for layer, shape in enumerate(shapes) for head in range(shape[0])]
        self.heads = _evenly(every, self._most_heads(like))
        self._dims = _shared(len(self.heads) if self._measure == "attention" else 1)
        self._axes: list[Axes] = []

    def _most_heads(self, like: Rows) -> int:
        if self._measure == "attention":
            return DIMS // _LEAST_DIMS
        widest = max(int(one.shape[2]) for one in like.tensors)
        return max(1, _MOST_RAW // (2 * widest))

    def learn(self, sample: Rows) -> None:
        """Choose the axes by these rows."""
        self._axes = [
            Axes.of(raw, dims - self._weighs)
            for raw, dims in zip(self._raw(sample), self._dims, strict=True)
        ]

    def of_rows(self, rows: Rows, nats: Tensor) -> list[Tensor]:
        """For each part of the index its vectors [n, d], of rows with surprisals [n] in nats."""
        parts = [axes.of_rows(raw) for axes, raw in zip(self._axes, self._raw(rows), strict=True)]
        if not self._weighs:
            return parts
        if self._measure == "attention":
            return [_beside(one, nats.clamp_min(_LEAST_NATS).log()) for one in parts]
        return [_beside(one * nats[:, None], nats) for one in parts]

    def of_query(self, query: Query, lowest: float) -> list[Tensor]:
        """For each part of the index its queries [m, d]; `lowest` is the lowest score of all.

        Raises LookupError when `attention` has no queries that fit the cached keys.
        """
        if self._measure == "attention":
            return self._logits_of(query, self._power)
        asked = self._looked_for(query)
        projected = asked @ self._axes[0].main
        if not self._weighs:
            return [projected]
        return [_beside(projected, asked @ self._axes[0].mean - lowest)]

    def of_softmax(self, query: Query) -> list[Tensor]:
        """The queries for what takes up most of the softmax, where `of_query` asks for others."""
        if self._measure != "attention" or not self._weighs:
            return []
        return self._logits_of(query, 0.0)

    def _logits_of(self, query: Query, weight: float) -> list[Tensor]:
        """What each head asks, [group x m, d], with `weight` of the log of the surprisal."""
        asked = [self._asked(query, *head) for head in self.heads]
        parts = [one @ axes.main for one, axes in zip(asked, self._axes, strict=True)]
        return [_beside(one, one.new_tensor(weight)) for one in parts] if self._weighs else parts

    def _raw(self, rows: Rows) -> list[Tensor]:
        """Vectors [n, D] before they are projected, one for each part."""
        pairs = {layer: self._pair(rows, layer) for layer in {one for one, _ in self.heads}}
        if self._measure == "attention":
            return [pairs[layer][0][head] for layer, head in self.heads]
        parts = [one[head] for layer, head in self.heads for one in pairs[layer]]
        return [torch.cat(parts, dim=1)]

    def _pair(self, rows: Rows, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [H, n, D], rotation taken back, as the measure sees them."""
        both = pair(layer, rows, self._rotations[layer])
        if self._measure.startswith("cosine"):
            both = (unit(both[0]), unit(both[1]))
        return both[0].cpu(), both[1].cpu()

    def _asked(self, query: Query, layer: int, head: int) -> Tensor:
        """What the query heads of this head of keys ask, [group x m, D]."""
        heard = query.asked(layer)
        dims = heard.queries.shape[-1]
        by_head = heard.queries.reshape(heard.heads, -1, dims)  # [H, group x m, D]
        return by_head[head].cpu() * heard.scale

    def _looked_for(self, query: Query) -> Tensor:
        """The query's keys and values of the chosen heads, [m, D] or their mean [1, D]."""
        parts = []
        for layer, head in self.heads:
            both = pair(layer, query.rows, self._rotations[layer])
            for one in both:
                ours = one[head] if self._measure == "cosine-pairwise" else one[head].mean(0)[None]
                parts.append(ours if self._measure == "mips" else unit(ours))
        return torch.cat(parts, dim=1).cpu() / (2 * len(self.heads))


def _beside(vectors: Tensor, more: Tensor) -> Tensor:
    """Vectors [n, d] with one number more, from `more` [n] or the same for all: [n, d + 1]."""
    return torch.cat([vectors, more.to(vectors.dtype).expand(len(vectors))[:, None]], dim=1)


def _shared(parts: int) -> list[int]:
    """DIMS, shared among the parts; what is left over goes to the later ones, of deeper layers."""
    steps, more = divmod(DIMS // _STEP, parts)
    return [_STEP * (steps + (part >= parts - more)) for part in range(parts)]


def _evenly(heads: list[Head], most: int) -> list[Head]:
    """At most `most` of them, evenly spread."""
    count = min(most, len(heads))
    return [heads[(2 * n + 1) * len(heads) // (2 * count)] for n in range(count)]
