"""Vectors of the largest inner products with a query: an inverted file of faiss, 8 bits a number.

Vectors go to the list of the nearest centroid; a search looks at the lists whose centroids have the
largest inner products with the query.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.segments import Positions

_PER_LIST = 40  # vectors to learn from for each list


def lists_for(rows: int) -> int:
    """How many lists suit this many rows."""
    return max(1, int(rows**0.5))


def sample_for(rows: int) -> int:
    """How many of this many rows the lists are learnt from."""
    return min(rows, _PER_LIST * lists_for(rows))


class Nearest:
    """Vectors [n, d] by stream position, found by inner product.

    Args:
        sample: vectors [k, d] to learn the lists from; d is fastest as a multiple of 8.
        rows: how many vectors are to come; four times as many still do well.
        probes: lists that a search looks at for each query, or more, so that all of its queries
            could see each list once.
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
        self._index.cp.min_points_per_centroid = 1  # few rows are no reason to warn
        self._index.train(_array(sample))
        self._centroids = self._quantizer.reconstruct_n(0, lists)  # [lists, d]

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def nbytes(self) -> int:
        """Memory of all vectors, positions and centroids, in bytes."""
        a_row = self._index.code_size + np.dtype(np.int64).itemsize
        return int(len(self) * a_row + self._centroids.nbytes)

    def add(self, positions: Positions, vectors: Tensor) -> None:
        """Store vectors [n, d] at these positions [n], where none are stored."""
        self._index.add_with_ids(_array(vectors), positions)

    def remove(self, positions: Positions) -> None:
        """Take out the vectors at these positions."""
        self._index.remove_ids(positions)

    def search(self, queries: Tensor, k: int) -> Positions:
        """Positions of the k best of each query [m, d], one after the other."""
        asked = _array(queries)
        near = asked @ self._centroids.T  # [m, lists]
        probes = min(near.shape[1], max(self._probes, near.shape[1] // len(asked)))
        lists = np.argpartition(-near, probes - 1, axis=1)[:, :probes]
        products = np.take_along_axis(near, lists, axis=1)
        self._index.nprobe = probes
        _, found = self._index.search_preassigned(asked, k, lists, products)
        positions: Positions = found[found >= 0]
        return positions


def _array(vectors: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(vectors.float().cpu().numpy())
