"""Vectors for the search index: their inner products with a query's vectors rank rows by score.

Let s be a row's surprisal, which multiplies its score.

- `attention`: one vector for each chosen head. Since exp(q k) s = exp(q k + log s), it is the key
  with log s appended; each token and query head gives a query with 1 appended. Where scores are
  softened, sqrt(score) s = sqrt(score s^2), so the query has 2 appended.
- other measures: one vector of all chosen heads' keys and values. (score - lowest) s is the inner
  product of that vector times s, with s appended, and the query with -lowest appended.

Vectors are projected to the principal axes of a sample of rows; a row has at most DIMS numbers.
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
"""Most numbers of a row in the index, over all its vectors."""

_MIN_DIMS, _STEP = 16, 8  # of one vector; faiss is fast at multiples of 8
_MAX_RAW_DIMS = 4096  # of the chosen heads' keys and values before projection
_MIN_NATS = 1e-6  # surprisal whose logarithm is still finite

Head = tuple[int, int]  # layer, key head


@dataclass(frozen=True)
class Axes:
    """A projection to principal axes.

    Attributes:
        mean: [D], subtracted first.
        main: [D, d], the principal axes.
    """

    mean: Tensor
    main: Tensor

    @staticmethod
    def of(sample: Tensor, dims: int) -> Axes:
        """The first `dims` principal axes of vectors [n, D], at most D."""
        mean = sample.mean(0)
        centred = sample - mean
        _, axes = torch.linalg.eigh(centred.T @ centred)  # by ascending variance
        return Axes(mean, axes[:, -dims:].contiguous())

    def of_rows(self, rows: Tensor) -> Tensor:
        """Rows [n, D] projected to [n, d]."""
        return (rows - self.mean) @ self.main


class Vectors:
    """Makes the vectors of rows and queries for one measure and weight.

    Args:
        recall: measure, weight and softening.
        rotations: one entry per layer of the model.
        like: rows of the same model, which give the number of heads and dimensions.

    Attributes:
        heads: the chosen heads, evenly spaced over layers and heads.
    """

    def __init__(
        self, recall: RecallSettings, rotations: Sequence[LayerRotation], like: Rows
    ) -> None:
        self._measure = recall.measure
        self._is_weighted = recall.weight == "surprisal"
        self._power = 2.0 if recall.soft else 1.0  # of the surprisal
        self._rotations = rotations
        shapes = [like.tensors[2 * n].shape for n in range(len(rotations))]
        every = [(layer, head) for layer, shape in enumerate(shapes) for head in range(shape[0])]
        self.heads = _evenly(every, self._max_heads(like))
        self._dims = _divide_dims(len(self.heads) if self._measure == "attention" else 1)
        self._axes: list[Axes] = []

    def _max_heads(self, like: Rows) -> int:
        if self._measure == "attention":
            return DIMS // _MIN_DIMS
        widest = max(int(tensor.shape[2]) for tensor in like.tensors)
        return max(1, _MAX_RAW_DIMS // (2 * widest))

    def learn(self, sample: Rows) -> None:
        """Compute the principal axes from these rows."""
        self._axes = [
            Axes.of(raw, dims - self._is_weighted)
            for raw, dims in zip(self._raw(sample), self._dims, strict=True)
        ]

    def of_rows(self, rows: Rows, nats: Tensor) -> list[Tensor]:
        """For each part of the index, the vectors [n, d] of rows with surprisals `nats` [n]."""
        parts = [axes.of_rows(raw) for axes, raw in zip(self._axes, self._raw(rows), strict=True)]
        if not self._is_weighted:
            return parts
        if self._measure == "attention":
            return [_append(part, nats.clamp_min(_MIN_NATS).log()) for part in parts]
        return [_append(part * nats[:, None], nats) for part in parts]

    def of_query(self, query: Query, lowest: float) -> list[Tensor]:
        """For each part of the index, its queries [m, d]; `lowest` is the lowest score of all rows.

        Raises LookupError when `attention` has no queries that match the cached keys.
        """
        if self._measure == "attention":
            return self._projected_queries(query, self._power)
        wanted = self._similarity_query(query)
        projected = wanted @ self._axes[0].main
        if not self._is_weighted:
            return [projected]
        return [_append(projected, wanted @ self._axes[0].mean - lowest)]

    def of_softmax(self, query: Query) -> list[Tensor]:
        """Queries for the rows with the largest attention logits, whatever their surprisal.

        These rows dominate the softmax's sum. Empty where `of_query` finds them, too.
        """
        if self._measure != "attention" or not self._is_weighted:
            return []
        return self._projected_queries(query, 0.0)

    def _projected_queries(self, query: Query, weight: float) -> list[Tensor]:
        """The queries of each chosen head, [group x m, d], with `weight` on log surprisal."""
        queries = [self._head_queries(query, *head) for head in self.heads]
        parts = [head @ axes.main for head, axes in zip(queries, self._axes, strict=True)]
        if not self._is_weighted:
            return parts
        return [_append(part, part.new_tensor(weight)) for part in parts]

    def _raw(self, rows: Rows) -> list[Tensor]:
        """Vectors [n, D] before projection, one for each part."""
        pairs = {layer: self._pair(rows, layer) for layer in {layer for layer, _ in self.heads}}
        if self._measure == "attention":
            return [pairs[layer][0][head] for layer, head in self.heads]
        parts = [tensor[head] for layer, head in self.heads for tensor in pairs[layer]]
        return [torch.cat(parts, dim=1)]

    def _pair(self, rows: Rows, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [H, n, D] as the measure compares them."""
        keys, values = pair(layer, rows, self._rotations[layer])
        if self._measure.startswith("cosine"):
            keys, values = unit(keys), unit(values)
        return keys.cpu(), values.cpu()

    def _head_queries(self, query: Query, layer: int, head: int) -> Tensor:
        """The queries [group x m, D] of all query heads that share this key head."""
        layer_queries = query.of_layer(layer)
        dims = layer_queries.queries.shape[-1]
        by_head = layer_queries.queries.reshape(layer_queries.heads, -1, dims)  # [H, group x m, D]
        return by_head[head].cpu() * layer_queries.scale

    def _similarity_query(self, query: Query) -> Tensor:
        """The query's keys and values of the chosen heads, [m, D] or their mean [1, D]."""
        parts = []
        for layer, head in self.heads:
            for tensor in pair(layer, query.rows, self._rotations[layer]):
                rows = tensor[head]
                wanted = rows if self._measure == "cosine-pairwise" else rows.mean(0)[None]
                parts.append(wanted if self._measure == "mips" else unit(wanted))
        return torch.cat(parts, dim=1).cpu() / (2 * len(self.heads))


def _append(vectors: Tensor, numbers: Tensor) -> Tensor:
    """Vectors [n, d] with one of the numbers [n], or the same number, appended: [n, d + 1]."""
    return torch.cat([vectors, numbers.to(vectors.dtype).expand(len(vectors))[:, None]], dim=1)


def _divide_dims(parts: int) -> list[int]:
    """DIMS divided among the parts; the remainder goes to the last ones, of deeper layers."""
    steps, more = divmod(DIMS // _STEP, parts)
    return [_STEP * (steps + (part >= parts - more)) for part in range(parts)]


def _evenly(heads: list[Head], most: int) -> list[Head]:
    """At most `most` of the heads, evenly spaced."""
    count = min(most, len(heads))
    return [heads[(2 * n + 1) * len(heads) // (2 * count)] for n in range(count)]
