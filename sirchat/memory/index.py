"""Find archived rows without looking at all: an index over what the measure compares.

The index learns from the rows that are there when it is made, and is made anew when there are four
times as many. What leaves the archive leaves the index; after `/forget` it is made anew without a
trace, for its axes and centroids come from the rows.
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

WORTHWHILE = 100_000
"""Archived rows above which `recall_index: auto` uses an index."""

HITS, PROPOSALS = 320, 16_384
"""Rows that each query vector proposes, at least, and that all of them propose together."""

_PROBES = {"attention": 64, "mips": 256, "cosine": 256, "cosine-pairwise": 512}  # lists looked at
_INDEXED = ("measure", "weight", "soft")
_GROWTH = 4
_BATCH = 16_384  # rows that are added at once

SurprisalOf = Callable[[Positions], NDArray[np.float64]]


def is_available() -> bool:
    """Whether faiss is installed."""
    return find_spec("faiss") is not None


class Index:
    """The archived rows' vectors under one measure and weight."""

    def __init__(self, recall: RecallSettings, rotations: Sequence[LayerRotation]) -> None:
        self._recall = recall
        self._rotations = rotations
        self._vectors: Vectors | None = None
        self._parts: list[Nearest] = []
        self._has = np.zeros(1024, bool)  # by position
        self._learnt = 0

    def __len__(self) -> int:
        return int(self._has.sum())

    @property
    def nbytes(self) -> int:
        """Memory of the index, in bytes."""
        return sum(one.nbytes for one in self._parts) + self._has.nbytes

    def is_for(self, recall: RecallSettings) -> bool:
        """Whether it finds what this recall looks for."""
        mine = self._recall
        return all(getattr(mine, key) == getattr(recall, key) for key in _INDEXED)

    def update(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        """Take in the archive's rows at these positions [n], ascending, that are not in yet."""
        if len(positions) and len(positions) > _GROWTH * self._learnt:
            self._learn(archive, positions, surprisal_of)
        self._reserve(int(positions[-1]) + 1 if len(positions) else 0)
        new = positions[~self._has[positions]]
        for start in range(0, len(new), _BATCH):
            self._add(archive, new[start : start + _BATCH], surprisal_of)

    def remove(self, positions: Positions) -> None:
        """Take out the rows at these positions [n], as far as they are in."""
        known = positions[positions < len(self._has)]
        mine = known[self._has[known]]
        if len(mine):
            for part in self._parts:
                part.remove(mine)
            self._has[mine] = False

    def propose(self, query: Query, lowest: float = 0.0) -> Positions:
        """Positions, ascending, of rows that may score high; `lowest` is the lowest score of all.

        Raises LookupError when `attention` has no queries that fit the cached keys.
        """
        if self._vectors is None:
            return np.zeros(0, np.int64)
        asked = self._vectors.of_query(query, lowest)
        k = max(HITS, PROPOSALS // sum(map(len, asked)))
        found = [part.search(one, k) for part, one in zip(self._parts, asked, strict=True)]
        for part, one in zip(self._parts, self._vectors.of_softmax(query), strict=False):
            found.append(part.search(one, HITS // 4))
        return united(found)

    @torch.inference_mode()
    def _learn(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        """Begin anew: choose axes and lists by an even sample of these rows."""
        rows = archive.fetch(evenly(positions, sample_for(len(positions))))
        self._vectors = Vectors(self._recall, self._rotations, rows)
        self._vectors.learn(rows)
        samples = self._vectors.of_rows(rows, _nats(rows, surprisal_of))
        probes = _PROBES[self._recall.measure]
        self._parts = [Nearest(one, len(positions), probes) for one in samples]
        self._has[:] = False
        self._learnt = len(positions)

    @torch.inference_mode()
    def _add(self, archive: Archive, positions: Positions, surprisal_of: SurprisalOf) -> None:
        if self._vectors is None:
            raise RuntimeError("nothing has been learnt yet")
        rows = archive.fetch(positions)
        vectors = self._vectors.of_rows(rows, _nats(rows, surprisal_of))
        for part, one in zip(self._parts, vectors, strict=True):
            part.add(positions, one)
        self._has[positions] = True

    def _reserve(self, rows: int) -> None:
        """Grow by doubling."""
        if rows > len(self._has):
            grown = np.zeros(max(rows, 2 * len(self._has)), bool)
            grown[: len(self._has)] = self._has
            self._has = grown


def united(parts: Sequence[Positions]) -> Positions:
    """What is in any of them, once, ascending. (Ten times as fast as to sort them.)"""
    there = np.zeros(1 + max((int(one.max()) for one in parts if len(one)), default=-1), bool)
    for one in parts:
        there[one] = True
    return np.flatnonzero(there)


def evenly(positions: Positions, count: int) -> Positions:
    """`count` of these positions, evenly spread; all, if there are no more."""
    if count >= len(positions):
        return positions
    return positions[np.arange(count) * len(positions) // count]


def _nats(rows: Rows, surprisal_of: SurprisalOf) -> Tensor:
    return torch.from_numpy(surprisal_of(rows.positions)).float()
