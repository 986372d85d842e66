"""An approximate search index over the archive, so that recall need not score every row.

Its projection axes and centroids are learnt from the rows archived when it is built; it is rebuilt
when there are four times as many. Rows that leave the archive are removed from the index. After
`/forget` it is rebuilt from the remaining rows, because axes and centroids carry traces of the
forgotten ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.cache import LayerRotation
from sirchat.memory.nearest import Nearest, sample_for
from sirchat.memory.recall import Query, RecallSettings
from sirchat.memory.segments import Positions, Rows
from sirchat.memory.vectors import Vectors

if TYPE_CHECKING:
    from sirchat.memory.archive import Archive

AUTO_INDEX_ROWS = 100_000
"""Number of archived rows above which `recall_index: auto` uses an index."""

HITS, PROPOSALS = 320, 16_384
"""Least number of rows that each query vector proposes, and number that all propose together."""

_PROBES = {"attention": 64, "mips": 256, "cosine": 256, "cosine-pairwise": 512}  # lists searched
_INDEXED_SETTINGS = ("measure", "weight", "soft")
_GROWTH = 4
_BATCH = 16_384  # rows added at once

SurprisalOf = Callable[[Positions], NDArray[np.float64]]
"""Gives the surprisals [n], in nats, of the rows at stream positions [n]."""


def is_available() -> bool:
    """Whether faiss is installed."""
    return find_spec("faiss") is not None


class Index:
    """A search index over archived rows, for one measure and weight.

    Args:
        recall: the measure, weight and softening that it serves.
        rotations: one entry per layer of the model.
    """

    def __init__(self, recall: RecallSettings, rotations: Sequence[LayerRotation]) -> None:
        self._recall = recall
        self._rotations = rotations
        self._vectors: Vectors | None = None
        self._parts: list[Nearest] = []
        self._has = np.zeros(1024, bool)  # by stream position
        self._learnt = 0  # number of archived rows when it was built

    def __len__(self) -> int:
        return int(self._has.sum())

    @property
    def nbytes(self) -> int:
        """Size of the index, in bytes."""
        return sum(part.nbytes for part in self._parts) + self._has.nbytes

    def is_for(self, recall: RecallSettings) -> bool:
        """Whether it can be searched under these settings."""
        built = self._recall
        return all(getattr(built, key) == getattr(recall, key) for key in _INDEXED_SETTINGS)

    def update(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        """Add the archive's rows at these positions [n], ascending, that are not indexed yet."""
        if len(positions) and len(positions) > _GROWTH * self._learnt:
            self._learn(archive, positions, surprisal_of)
        self._reserve(int(positions[-1]) + 1 if len(positions) else 0)
        new = positions[~self._has[positions]]
        for start in range(0, len(new), _BATCH):
            self._add(archive, new[start : start + _BATCH], surprisal_of)

    def remove(self, positions: Positions) -> None:
        """Remove the rows at these positions [n]; those that are not indexed are skipped."""
        in_range = positions[positions < len(self._has)]
        indexed = in_range[self._has[in_range]]
        if len(indexed):
            for part in self._parts:
                part.remove(indexed)
            self._has[indexed] = False

    def propose(self, query: Query, lowest: float = 0.0) -> Positions:
        """Positions, ascending, of the rows that probably score highest.

        `lowest` is the lowest score of all rows, which a score weighted by surprisal is counted
        from. Raises LookupError when `attention` has no queries that match the cached keys.
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
        self._vectors = Vectors(self._recall, self._rotations, rows)
        self._vectors.learn(rows)
        samples = self._vectors.of_rows(rows, _nats(rows, surprisal_of))
        probes = _PROBES[self._recall.measure]
        self._parts = [Nearest(sample, len(positions), probes) for sample in samples]
        self._has[:] = False
        self._learnt = len(positions)

    @torch.inference_mode()
    def _add(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        if self._vectors is None:
            raise RuntimeError("nothing has been learnt yet")
        rows = archive.fetch(positions)
        vectors = self._vectors.of_rows(rows, _nats(rows, surprisal_of))
        for part, added in zip(self._parts, vectors, strict=True):
            part.add(positions, added)
        self._has[positions] = True

    def _reserve(self, rows: int) -> None:
        """Grow by doubling."""
        if rows > len(self._has):
            grown = np.zeros(max(rows, 2 * len(self._has)), bool)
            grown[: len(self._has)] = self._has
            self._has = grown


def united(parts: Sequence[Positions]) -> Positions:
    """The union of positions, ascending. (Ten times as fast as `np.unique`, which sorts.)"""
    mask = np.zeros(1 + max((int(part.max()) for part in parts if len(part)), default=-1), bool)
    for part in parts:
        mask[part] = True
    return np.flatnonzero(mask)


def evenly(positions: Positions, count: int) -> Positions:
    """`count` of these positions, evenly spaced; all of them, if there are no more."""
    if count >= len(positions):
        return positions
    return positions[np.arange(count) * len(positions) // count]


def _nats(rows: Rows, surprisal_of: SurprisalOf) -> Tensor:
    return torch.from_numpy(surprisal_of(rows.positions)).float()
