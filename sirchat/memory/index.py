"""The search index of the archive: uses faiss to propose the rows that probably score highest.

A row is one archived token. The index has one or several parts. In each part, a row has one vector,
and the inner product with a query's vector ranks the rows. The vectors are projections to principal
axes; faiss groups the vectors in lists, each around a centroid. Axes and centroids are learnt from
the rows that are archived when the index is built. The index is rebuilt when the archive has more
than four times as many rows. Rows removed from the archive are removed from the index, too. After
`/erase` the index is rebuilt from the remaining rows, because axes and centroids carry traces of
the erased rows.
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
from sirchat.memory.segments import Positions, Rows, united

if TYPE_CHECKING:
    from sirchat.memory.archive import Archive

AUTO_INDEX_ROWS = 100_000
"""Number of archived rows above which `recall_index: auto` uses an index."""

HITS, PROPOSALS = 320, 16_384
"""Minimum number of rows proposed for one query vector, and usual number for all together."""

_INDEXED_SETTINGS = ("retriever", "weight", "soft")
_GROWTH = 4
_BATCH = 16_384  # rows added at once

SurprisalOf = Callable[[Positions], NDArray[np.float64]]
"""A function that returns the surprisals [n], in nats, of the tokens at stream positions [n]."""


def is_available() -> bool:
    """Whether faiss, the library for vector search, is installed."""
    return find_spec("faiss") is not None


class Index:
    """A search index over archived rows (tokens), which proposes rows that probably score highest.

    Args:
        recall: settings of recall; the index is valid only for the same values of `retriever`,
            `weight` and `soft`.
        rotations: rotary position embedding of each layer of the model.
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
        """Size of the search index in memory, in bytes."""
        return sum(part.nbytes for part in self._parts) + self._has.nbytes

    def is_for(self, recall: RecallSettings) -> bool:
        """Whether the index was built for the same `retriever`, `weight` and `soft` as `recall`."""
        built = self._recall
        return all(getattr(built, key) == getattr(recall, key) for key in _INDEXED_SETTINGS)

    def update(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        """Add the archived rows that the index lacks.

        `positions` [n] are the stream positions of all archived rows, ascending. If their number is
        more than four times the number when the index was built, the index is built anew.
        `surprisal_of` returns the surprisals of rows.
        """
        if len(positions) and len(positions) > _GROWTH * self._learnt:
            self._learn(archive, positions, surprisal_of)
        self._grow(int(positions[-1]) + 1 if len(positions) else 0)
        new = positions[~self._has[positions]]
        for start in range(0, len(new), _BATCH):
            self._add(archive, new[start : start + _BATCH], surprisal_of)

    def remove(self, positions: Positions) -> None:
        """Remove the rows at these stream positions from the index.

        Positions that the index does not have are skipped.
        """
        in_range = positions[positions < len(self._has)]
        indexed = in_range[self._has[in_range]]
        if len(indexed):
            for part in self._parts:
                part.remove(indexed)
            self._has[indexed] = False

    def propose(self, query: Query, lowest: float = 0.0) -> Positions:
        """Find the rows that probably score highest for the query; returns stream positions.

        The positions are ascending. `lowest` is the lowest score of any row; it is subtracted from
        each score before this is multiplied by the token's surprisal. Raises LookupError if the
        retriever `attention` has no query vectors that can be compared with the cached keys.
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
        """Empty the index; learn its axes and centroids again from a sample of archived rows.

        `positions` are the stream positions of all archived rows; the sample is evenly spaced.
        """
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
        """Make the mask of indexed rows, one entry per stream position, at least `rows` long.

        A mask that is too short becomes at least twice as long.
        """
        if rows > len(self._has):
            grown = np.zeros(max(rows, 2 * len(self._has)), bool)
            grown[: len(self._has)] = self._has
            self._has = grown


def evenly(positions: Positions, count: int) -> Positions:
    """Choose `count` of the stream positions at even intervals.

    Returns all positions if there are at most `count`.
    """
    if count >= len(positions):
        return positions
    return positions[np.arange(count) * len(positions) // count]


def _nats(rows: Rows, surprisal_of: SurprisalOf) -> Tensor:
    return torch.from_numpy(surprisal_of(rows.positions)).float()


DIMS = 256
"""Maximum total number of dimensions of all vectors that the index stores for one row."""

_MIN_DIMS, _STEP = 16, 8  # of one vector; faiss is fast at multiples of 8
_MAX_RAW_DIMS = 4096  # of the chosen heads' keys and values before projection
_MIN_NATS = 1e-6  # surprisal whose logarithm is still finite

Head = tuple[int, int]  # layer, key head


@dataclass(frozen=True)
class Axes:
    """A projection of vectors with D dimensions to d principal axes.

    Attributes:
        mean: [D], the mean, which is subtracted from a vector before it is projected.
        main: [D, d], the principal axes.
    """

    mean: Tensor
    main: Tensor

    @staticmethod
    def of(sample: Tensor, dims: int) -> Axes:
        """Compute the mean and the first `dims` principal axes of the vectors `sample` [n, D].

        If `dims` is larger than D, D axes are computed.
        """
        mean = sample.mean(0)
        centred = sample - mean
        _, axes = torch.linalg.eigh(centred.T @ centred)  # by ascending variance
        return Axes(mean, axes[:, -dims:].contiguous())

    def of_rows(self, rows: Tensor) -> Tensor:
        """Project the vectors `rows` [n, D] to the principal axes; returns vectors [n, d]."""
        return (rows - self.mean) @ self.main


class IndexVectors:
    """Computes the vectors that the search index stores for rows, and those of a query.

    The inner product of a query's vector and a row's vector ranks rows like the retriever's scores.
    With a retriever that compares attention queries, the index has one part per chosen head;
    with any other retriever, it has a single part.

    Args:
        recall: settings of recall, with the retriever, `weight` and `soft`.
        rotations: rotary position embedding of each layer of the model.
        like: any rows of the same model, which show the numbers of heads and dimensions.

    Attributes:
        heads: (layer, key head) of each head whose keys are compared; evenly spaced among all.
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
        """Compute the principal axes of each part of the search index from the rows `sample`."""
        self._axes = [
            Axes.of(raw, dims - self._is_weighted)
            for raw, dims in zip(self._raw(sample), self._dims, strict=True)
        ]

    def of_rows(self, rows: Rows, nats: Tensor) -> list[Tensor]:
        """Compute the vectors that the index stores for n rows: one tensor [n, d] for each part.

        `nats` [n] are the surprisals of the rows, in nats.
        """
        parts = [axes.of_rows(raw) for axes, raw in zip(self._axes, self._raw(rows), strict=True)]
        if not self._is_weighted:
            return parts
        if self._retriever.needs_queries:
            return [_append(part, nats.clamp_min(_MIN_NATS).log()) for part in parts]
        return [_append(part * nats[:, None], nats) for part in parts]

    def of_query(self, query: Query, lowest: float) -> list[Tensor]:
        """Compute the vectors of a query to search with: a tensor [m, d] for each index part.

        `lowest` is the lowest score of any row. Raises LookupError if the retriever `attention` has
        no query vectors that can be compared with the cached keys.
        """
        if self._retriever.needs_queries:
            return self._projected_queries(query, self._power)
        wanted = self._similarity_query(query)
        projected = wanted @ self._axes[0].main
        if not self._is_weighted:
            return [projected]
        return [_append(projected, wanted @ self._axes[0].mean - lowest)]

    def of_softmax(self, query: Query) -> list[Tensor]:
        """Compute vectors that find the rows with the largest attention logits.

        These rows have the largest terms in the sum of the softmax. Their surprisals have no
        influence on this search. Returns a tensor [m, d] for each part of the index, or an empty
        list if the vectors of `of_query` find these rows already.
        """
        if not self._retriever.needs_queries or not self._is_weighted:
            return []
        return self._projected_queries(query, 0.0)

    def _projected_queries(self, query: Query, weight: float) -> list[Tensor]:
        """Project the query vectors of each chosen key head to the index's axes.

        Returns a tensor [group x m, d] for each key head; `group` is the number of query heads per
        key head. If rows are weighted by surprisal, the last dimension is `weight`: the factor of a
        row's log surprisal in the inner product.
        """
        queries = [self._head_queries(query, *head) for head in self.heads]
        parts = [head @ axes.main for head, axes in zip(queries, self._axes, strict=True)]
        if not self._is_weighted:
            return parts
        return [_append(part, part.new_tensor(weight)) for part in parts]

    def _raw(self, rows: Rows) -> list[Tensor]:
        """The rows' vectors before projection: a tensor [n, D] for each part of the index."""
        pairs = {layer: self._pair(rows, layer) for layer in {layer for layer, _ in self.heads}}
        if self._retriever.needs_queries:
            return [pairs[layer][0][head] for layer, head in self.heads]
        parts = [tensor[head] for layer, head in self.heads for tensor in pairs[layer]]
        return [torch.cat(parts, dim=1)]

    def _pair(self, rows: Rows, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of `rows` as the retriever compares them: each [H, n, D].

        Rotary positions are undone.
        """
        keys, values = pair(layer, rows, self._rotations[layer])
        if isinstance(self._retriever, SimilarityRetriever):
            keys, values = self._retriever.vectors(keys, values)
        return keys.cpu(), values.cpu()

    def _head_queries(self, query: Query, layer: int, head: int) -> Tensor:
        """The scaled query vectors [group x m, D] of the `group` query heads of one key head."""
        layer_queries = query.of_layer(layer)
        dims = layer_queries.queries.shape[-1]
        by_head = layer_queries.queries.reshape(layer_queries.heads, -1, dims)  # [H, group x m, D]
        return by_head[head].cpu() * layer_queries.scale

    def _similarity_query(self, query: Query) -> Tensor:
        """The query's vectors [m, D]: for each of its m tokens, keys and values of chosen heads.

        Keys and values of all chosen heads are joined to one vector. If the retriever compares rows
        with the query's mean, returns one vector [1, D].
        """
        if not isinstance(self._retriever, SimilarityRetriever):
            raise TypeError("a search index needs queries, or a retriever by similarity")
        parts: list[Tensor] = []
        for layer, head in self.heads:
            keys, values = pair(layer, query.rows, self._rotations[layer])
            parts += self._retriever.vectors_of_query(keys[head], values[head])
        return torch.cat(parts, dim=1).cpu() / (2 * len(self.heads))


def _append(vectors: Tensor, numbers: Tensor) -> Tensor:
    """Append one dimension to vectors [n, d]; returns vectors [n, d + 1].

    `numbers` [n] are the vectors' values in this dimension, or one value for all vectors.
    """
    return torch.cat([vectors, numbers.to(vectors.dtype).expand(len(vectors))[:, None]], dim=1)


def _divide_dims(parts: int) -> list[int]:
    """Divide the `DIMS` dimensions of the index among its parts.

    Returns the number of dimensions of each part. The last parts, which belong to deeper layers,
    get the remainder of the division.
    """
    steps, more = divmod(DIMS // _STEP, parts)
    return [_STEP * (steps + (part >= parts - more)) for part in range(parts)]


def _evenly(heads: list[Head], most: int) -> list[Head]:
    """Choose at most `most` of the attention heads, at even intervals."""
    count = min(most, len(heads))
    return [heads[(2 * n + 1) * len(heads) // (2 * count)] for n in range(count)]


_PER_LIST = 40  # training vectors for each list


def lists_for(rows: int) -> int:
    """The number of lists into which faiss divides an index of `rows` vectors."""
    return max(1, int(rows**0.5))


def sample_for(rows: int) -> int:
    """The number of vectors from which faiss learns centroids, for an index of `rows` vectors."""
    return min(rows, _PER_LIST * lists_for(rows))


class FaissIndex:
    """Stores one vector [d] for each token, and finds the vectors with the largest inner products.

    Tokens are named by their stream positions. faiss groups the vectors in lists, each around a
    centroid; a search visits only some lists.

    Args:
        sample: vectors [k, d] to learn the centroids from; fastest if d is a multiple of 8.
        rows: expected number of vectors; four times as many still work well.
        probes: minimum number of lists that each query visits. If there are few queries, each query
            visits more lists: the number of lists divided by the number of queries.
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
        """Size of this index in bytes: all vectors, positions and centroids."""
        row_bytes = self._index.code_size + np.dtype(np.int64).itemsize
        return int(len(self) * row_bytes + self._centroids.nbytes)

    def add(self, positions: Positions, vectors: Tensor) -> None:
        """Store `vectors` [n, d] for the tokens at stream `positions` [n].

        None of these tokens may have a vector already.
        """
        self._index.add_with_ids(_array(vectors), positions)

    def remove(self, positions: Positions) -> None:
        """Delete the vectors of the tokens at these stream positions [n]."""
        self._index.remove_ids(positions)

    def search(self, queries: Tensor, k: int) -> Positions:
        """Find the k vectors with the largest inner product with each of the queries [m, d].

        Returns the stream positions of their tokens, for all queries in one array. The same
        position can occur several times.
        """
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
