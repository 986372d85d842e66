"""The search index of the archive: vectors whose inner products rank rows, searched with faiss.

Its projection axes and centroids are learnt from the rows archived when the index is built; it is
rebuilt when the archive has four times as many. Rows removed from the archive are removed from the
index, too. After `/erase` the index is rebuilt from the remaining rows, because axes and centroids
carry traces of the erased rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.recall import retriever
from sirchat.memory.recall.base import SimilarityRetriever
from sirchat.memory.retrieval import Query, RecallSettings, pair
from sirchat.memory.segments import Positions, Rows

if TYPE_CHECKING:
    from sirchat.memory.archive import Archive

AUTO_INDEX_ROWS = 100_000
"""Number of archived rows above which `recall_index: auto` uses an index."""

HITS, PROPOSALS = 320, 16_384
"""Fewest rows that one query vector proposes; number of rows that all together should propose."""

_INDEXED_SETTINGS = ("retriever", "weight", "soft")
_GROWTH = 4
_BATCH = 16_384  # rows added at once

SurprisalOf = Callable[[Positions], NDArray[np.float64]]
"""Gives the surprisals [n], in nats, of the rows at stream positions [n]."""


def is_available() -> bool:
    """Whether faiss is installed."""
    return find_spec("faiss") is not None


class Index:
    """A search index over archived rows, for one retriever and weight.

    Args:
        recall: the settings whose retriever, weight and softening the index serves.
        rotations: one entry per layer of the model.
    """

    def __init__(self, recall: RecallSettings, rotations: Sequence[LayerRotation]) -> None:
        self._recall = recall
        self._rotations = rotations
        self._vectors: IndexVectors | None = None
        self._parts: list[FaissIndex] = []
        self._has = np.zeros(1024, bool)  # by stream position
        self._learnt = 0  # number of archived rows when it was built

    def __len__(self) -> int:
        return int(self._has.sum())

    @property
    def nbytes(self) -> int:
        """Size of the index, in bytes."""
        return sum(part.nbytes for part in self._parts) + self._has.nbytes

    def is_for(self, recall: RecallSettings) -> bool:
        """Whether the index can be searched under these settings."""
        built = self._recall
        return all(getattr(built, key) == getattr(recall, key) for key in _INDEXED_SETTINGS)

    def update(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        """Add the archived rows at these positions [n], ascending, if they are not indexed yet."""
        if len(positions) and len(positions) > _GROWTH * self._learnt:
            self._learn(archive, positions, surprisal_of)
        self._grow(int(positions[-1]) + 1 if len(positions) else 0)
        new = positions[~self._has[positions]]
        for start in range(0, len(new), _BATCH):
            self._add(archive, new[start : start + _BATCH], surprisal_of)

    def remove(self, positions: Positions) -> None:
        """Remove the rows at these positions [n]; rows that are not indexed are skipped."""
        in_range = positions[positions < len(self._has)]
        indexed = in_range[self._has[in_range]]
        if len(indexed):
            for part in self._parts:
                part.remove(indexed)
            self._has[indexed] = False

    def propose(self, query: Query, lowest: float = 0.0) -> Positions:
        """Positions, ascending, of the rows that probably score highest.

        `lowest` is the lowest score of all rows; it is subtracted from a score before the score is
        weighted by surprisal. Raises LookupError if the retriever `attention` has no queries that
        match the cached keys.
        """
        if self._vectors is None:
            return np.zeros(0, np.int64)
        queries = self._vectors.of_query(query, lowest)
        k = max(HITS, PROPOSALS // sum(map(len, queries)))
        found = [
            part.search(vectors, k) for part, vectors in zip(self._parts, queries, strict=True)
        ]
        for part, vectors in zip(self._parts, self._vectors.of_softmax(query), strict=False):
            found.append(part.search(vectors, HITS // 4))
        return united(found)

    @torch.inference_mode()
    def _learn(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        """Start over: learn axes and centroids from an evenly spaced sample of these rows."""
        rows = archive.fetch(evenly(positions, sample_for(len(positions))))
        self._vectors = IndexVectors(self._recall, self._rotations, rows)
        self._vectors.learn(rows)
        samples = self._vectors.of_rows(rows, _nats(rows, surprisal_of))
        probes = retriever(self._recall.retriever).index_probes
        self._parts = [FaissIndex(sample, len(positions), probes) for sample in samples]
        self._has[:] = False
        self._learnt = len(positions)

    @torch.inference_mode()
    def _add(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        if self._vectors is None:
            raise RuntimeError("the projection axes have not been learnt yet")
        rows = archive.fetch(positions)
        vectors = self._vectors.of_rows(rows, _nats(rows, surprisal_of))
        for part, added in zip(self._parts, vectors, strict=True):
            part.add(positions, added)
        self._has[positions] = True

    def _grow(self, rows: int) -> None:
        """Make room for positions below `rows`; the mask at least doubles if it is too short."""
        if rows > len(self._has):
            grown = np.zeros(max(rows, 2 * len(self._has)), bool)
            grown[: len(self._has)] = self._has
            self._has = grown


def united(parts: Sequence[Positions]) -> Positions:
    """The union of arrays `parts`, ascending. (Ten times as fast as `np.unique`, which sorts.)"""
    mask = np.zeros(1 + max((int(part.max()) for part in parts if len(part)), default=-1), bool)
    for part in parts:
        mask[part] = True
    return np.flatnonzero(mask)


def evenly(positions: Positions, count: int) -> Positions:
    """`count` of these positions, evenly spaced; all of them if there are at most `count`."""
    if count >= len(positions):
        return positions
    return positions[np.arange(count) * len(positions) // count]


def _nats(rows: Rows, surprisal_of: SurprisalOf) -> Tensor:
    return torch.from_numpy(surprisal_of(rows.positions)).float()


DIMS = 256
"""Maximum number of numbers that the index stores for one row, over all vectors of the row."""

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
        """The first `dims` principal axes (at most D) of the vectors `sample` [n, D]."""
        mean = sample.mean(0)
        centred = sample - mean
        _, axes = torch.linalg.eigh(centred.T @ centred)  # by ascending variance
        return Axes(mean, axes[:, -dims:].contiguous())

    def of_rows(self, rows: Tensor) -> Tensor:
        """Rows [n, D] projected to [n, d]."""
        return (rows - self.mean) @ self.main


class IndexVectors:
    """Makes the vectors of rows and queries for one retriever and weight.

    Args:
        recall: retriever, weight and softening.
        rotations: one entry per layer of the model.
        like: rows of the same model, which give the number of heads and dimensions.

    Attributes:
        heads: the chosen heads, evenly spaced over layers and heads.
    """

    def __init__(
        self, recall: RecallSettings, rotations: Sequence[LayerRotation], like: Rows
    ) -> None:
        self._retriever = retriever(recall.retriever)
        self._is_weighted = recall.weight == "surprisal"
        self._power = 2.0 if recall.soft else 1.0  # of the surprisal
        self._rotations = rotations
        shapes = [like.tensors[2 * n].shape for n in range(len(rotations))]
        every = [(layer, head) for layer, shape in enumerate(shapes) for head in range(shape[0])]
        self.heads = _evenly(every, self._max_heads(like))
        self._dims = _divide_dims(len(self.heads) if self._retriever.needs_queries else 1)
        self._axes: list[Axes] = []

    def _max_heads(self, like: Rows) -> int:
        if self._retriever.needs_queries:
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
        if self._retriever.needs_queries:
            return [_append(part, nats.clamp_min(_MIN_NATS).log()) for part in parts]
        return [_append(part * nats[:, None], nats) for part in parts]

    def of_query(self, query: Query, lowest: float) -> list[Tensor]:
        """For each part of the index, its queries [m, d]; `lowest` is the lowest score of all rows.

        Raises LookupError if the retriever `attention` has no queries that match the cached keys.
        """
        if self._retriever.needs_queries:
            return self._projected_queries(query, self._power)
        wanted = self._similarity_query(query)
        projected = wanted @ self._axes[0].main
        if not self._is_weighted:
            return [projected]
        return [_append(projected, wanted @ self._axes[0].mean - lowest)]

    def of_softmax(self, query: Query) -> list[Tensor]:
        """Queries for the rows with the largest attention logits, whatever their surprisal.

        These rows dominate the softmax's sum. An empty list if `of_query` already finds them.
        """
        if not self._retriever.needs_queries or not self._is_weighted:
            return []
        return self._projected_queries(query, 0.0)

    def _projected_queries(self, query: Query, weight: float) -> list[Tensor]:
        """Projected queries [group x m, d] of each chosen head; `weight` is for log surprisal."""
        queries = [self._head_queries(query, *head) for head in self.heads]
        parts = [head @ axes.main for head, axes in zip(queries, self._axes, strict=True)]
        if not self._is_weighted:
            return parts
        return [_append(part, part.new_tensor(weight)) for part in parts]

    def _raw(self, rows: Rows) -> list[Tensor]:
        """For each part of the index, the vectors [n, D] of the rows before projection."""
        pairs = {layer: self._pair(rows, layer) for layer in {layer for layer, _ in self.heads}}
        if self._retriever.needs_queries:
            return [pairs[layer][0][head] for layer, head in self.heads]
        parts = [tensor[head] for layer, head in self.heads for tensor in pairs[layer]]
        return [torch.cat(parts, dim=1)]

    def _pair(self, rows: Rows, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [H, n, D] as the retriever compares them."""
        keys, values = pair(layer, rows, self._rotations[layer])
        if isinstance(self._retriever, SimilarityRetriever):
            keys, values = self._retriever.vectors(keys, values)
        return keys.cpu(), values.cpu()

    def _head_queries(self, query: Query, layer: int, head: int) -> Tensor:
        """The queries [group x m, D] of all query heads that share this key head."""
        layer_queries = query.of_layer(layer)
        dims = layer_queries.queries.shape[-1]
        by_head = layer_queries.queries.reshape(layer_queries.heads, -1, dims)  # [H, group x m, D]
        return by_head[head].cpu() * layer_queries.scale

    def _similarity_query(self, query: Query) -> Tensor:
        """The turn's keys and values in the chosen heads, joined: [m, D], or their mean [1, D]."""
        if not isinstance(self._retriever, SimilarityRetriever):
            raise TypeError("a search index needs queries, or a retriever by similarity")
        parts: list[Tensor] = []
        for layer, head in self.heads:
            keys, values = pair(layer, query.rows, self._rotations[layer])
            parts += self._retriever.vectors_of_query(keys[head], values[head])
        return torch.cat(parts, dim=1).cpu() / (2 * len(self.heads))


def _append(vectors: Tensor, numbers: Tensor) -> Tensor:
    """Append a last column to vectors [n, d]: `numbers` [n], or one number for all of them."""
    return torch.cat([vectors, numbers.to(vectors.dtype).expand(len(vectors))[:, None]], dim=1)


def _divide_dims(parts: int) -> list[int]:
    """Divide DIMS among this many `parts`; the last parts (deeper layers) get the remainder."""
    steps, more = divmod(DIMS // _STEP, parts)
    return [_STEP * (steps + (part >= parts - more)) for part in range(parts)]


def _evenly(heads: list[Head], most: int) -> list[Head]:
    """At most `most` of the heads, evenly spaced."""
    count = min(most, len(heads))
    return [heads[(2 * n + 1) * len(heads) // (2 * count)] for n in range(count)]


_PER_LIST = 40  # training vectors for each list


def lists_for(rows: int) -> int:
    """Number of faiss lists for an index of `rows` rows."""
    return max(1, int(rows**0.5))


def sample_for(rows: int) -> int:
    """Number of vectors to learn the centroids from, for an index of `rows` rows."""
    return min(rows, _PER_LIST * lists_for(rows))


class FaissIndex:
    """Vectors [n, d] by stream position, searched by inner product with faiss.

    Args:
        sample: vectors [k, d] to learn the centroids from; fastest where d is a multiple of 8.
        rows: expected number of vectors; four times as many still work well.
        probes: least number of lists that each query visits; with few queries, each visits more,
            so that all queries together could visit every list once.
    """

    def __init__(self, sample: Tensor, rows: int, probes: int) -> None:
        import faiss

        self._probes = probes
        count, dims = sample.shape
        lists = max(1, min(lists_for(rows), count // _PER_LIST))
        self._quantizer: Any = faiss.IndexFlatL2(dims)
        kind = faiss.ScalarQuantizer.QT_8bit
        metric = faiss.METRIC_INNER_PRODUCT
        self._index: Any = faiss.IndexIVFScalarQuantizer(self._quantizer, dims, lists, kind, metric)
        self._index.cp.min_points_per_centroid = 1  # else faiss warns about small samples
        self._index.train(_array(sample))
        self._centroids = self._quantizer.reconstruct_n(0, lists)  # [lists, d]

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def nbytes(self) -> int:
        """Size of all vectors, positions and centroids, in bytes."""
        row_bytes = self._index.code_size + np.dtype(np.int64).itemsize
        return int(len(self) * row_bytes + self._centroids.nbytes)

    def add(self, positions: Positions, vectors: Tensor) -> None:
        """Add vectors [n, d] at these positions [n], which must not be in use."""
        self._index.add_with_ids(_array(vectors), positions)

    def remove(self, positions: Positions) -> None:
        """Remove the vectors at these positions [n]."""
        self._index.remove_ids(positions)

    def search(self, queries: Tensor, k: int) -> Positions:
        """Positions of the best k vectors for each of the queries [m, d], concatenated."""
        wanted = _array(queries)
        to_centroids = wanted @ self._centroids.T  # [m, lists]
        count = to_centroids.shape[1]
        probes = min(count, max(self._probes, count // len(wanted)))
        lists = np.argpartition(-to_centroids, probes - 1, axis=1)[:, :probes]
        products = np.take_along_axis(to_centroids, lists, axis=1)
        self._index.nprobe = probes
        _, found = self._index.search_preassigned(wanted, k, lists, products)
        positions: Positions = found[found >= 0]
        return positions


def _array(vectors: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(vectors.float().cpu().numpy())
