"""Maximum inner product search: a faiss inverted file (IVF) with 8 bits per number.

Each vector is in the list of its nearest centroid; a search visits the lists whose centroids have
the largest inner products with the query.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.segments import Positions

_PER_LIST = 40  # training vectors for each list


def lists_for(rows: int) -> int:
    """Number of lists for this many rows."""
    return max(1, int(rows**0.5))


def sample_for(rows: int) -> int:
    """Number of vectors to learn the centroids from, for this many rows."""
    return min(rows, _PER_LIST * lists_for(rows))


class Nearest:
    """Vectors [n, d] by stream position, searched by inner product.

    Args:
        sample: vectors [k, d] to learn the centroids from; fastest where d is a multiple of 8.
        rows: expected number of vectors; four times as many still work well.
        probes: least number of lists visited for each query; more where a search has few queries,
            so that all of its queries together could visit each list once.
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
