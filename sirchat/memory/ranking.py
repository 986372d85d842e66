"""Score archived rows for a query: all of them, or exactly those that an index proposes.

With an index, an even sample of all rows is scored too. It stands in the softmax of `attention` for
the rows that were not proposed; under the other measures it tells the lowest score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.archive import Archive
from sirchat.memory.cache import LayerRotation
from sirchat.memory.index import WORTHWHILE, Index, SurprisalOf, evenly, is_available, united
from sirchat.memory.recall import Blocks, Query, RecallSettings, score, softened, weighted
from sirchat.memory.segments import Positions, Rows

SAMPLE = 32_768
"""Rows that stand for those that were not proposed, in the softmax of `attention`."""

LOWEST_OF = 16_384, 65_536
"""Rows of which the lowest score is taken, at least and at most; between them, `_PART` of all."""

_PART = 1 / 16
_BATCH = 8_192  # rows that are fetched at once


@dataclass(frozen=True)
class Ranked:
    """Candidates at `positions` [n], ascending, and their scores [layers, n]."""

    positions: Positions
    scores: Tensor


def wants_index(recall: RecallSettings, rows: int) -> bool:
    """Whether this many archived rows are searched through an index."""
    if recall.index == "off" or recall.measure == "random" or recall.scope == "layer":
        return False
    return recall.index == "on" or (rows > WORTHWHILE and is_available())


@dataclass(frozen=True)
class Ranking:
    """A search: for rows like `query`'s, among those at `archived` [n], ascending and stored."""

    archive: Archive
    archived: Positions
    query: Query
    recall: RecallSettings
    rotations: Sequence[LayerRotation]
    surprisal_of: SurprisalOf

    def all(self) -> Ranked:
        """The scores of all rows."""
        blocks = partial(self.archive.blocks, self.archived)
        order = np.argsort(np.concatenate([rows.positions for rows in blocks()]))
        scores = self._score(blocks)[:, torch.from_numpy(order)]
        return Ranked(self.archived, self._finished(scores, self.archived))

    def proposed(self) -> Ranked:
        """The scores of the rows that are likely the best.

        The archive's index is made, or brought up to date.
        """
        archive, recall = self.archive, self.recall
        if archive.index is None or not archive.index.is_for(recall):
            archive.index = Index(recall, self.rotations)
        archive.index.update(archive, self.archived, self.surprisal_of)
        rank = self._attended if recall.measure == "attention" else self._similar
        ranked = rank(archive.index)
        return Ranked(ranked.positions, self._finished(ranked.scores, ranked.positions))

    def _attended(self, index: Index) -> Ranked:
        """What is proposed and a sample of the rest share the softmax of `attention`."""
        near = max(self.recall.span, int(self.recall.soft))
        proposed = _archived_near(index.propose(self.query), near, self.archived)
        positions = united((proposed, evenly(self.archived, SAMPLE)))
        shares = _shares(_is_among(positions, proposed), len(self.archived))
        rows = self.archive.fetch(positions, values=False)
        return Ranked(positions, self._score(_once(rows), shares))

    def _similar(self, index: Index) -> Ranked:
        """A sample tells the lowest score, from which a weighted one is counted."""
        few, many = LOWEST_OF
        weighs = self.recall.weight == "surprisal"
        count = int(np.clip(_PART * len(self.archived), few, many))
        sample = evenly(self.archived, count if weighs else 0)
        sampled = self._scores_of(sample)
        lowest = float(sampled.amin(1).mean()) if weighs else 0.0
        proposed = index.propose(self.query, lowest)
        proposed = _archived_near(proposed, self.recall.span, self.archived)
        new = proposed[~_is_among(proposed, sample)]
        positions = np.concatenate([sample, new])
        order = np.argsort(positions)
        scores = torch.cat([sampled, self._scores_of(new)], dim=1)[:, torch.from_numpy(order)]
        return Ranked(positions[order], scores)

    def _scores_of(self, positions: Positions) -> Tensor:
        """A measure's scores [layers, k], a batch of rows at a time."""
        found = [torch.zeros(len(self.rotations), 0)]
        for start in range(0, len(positions), _BATCH):
            rows = self.archive.fetch(positions[start : start + _BATCH])
            found.append(self._score(_once(rows)))
        return torch.cat(found, dim=1)

    def _score(self, blocks: Blocks, shares: Tensor | None = None) -> Tensor:
        return score(self.recall.measure, self.query, blocks, self.rotations, shares)

    def _finished(self, scores: Tensor, positions: Positions) -> Tensor:
        """A measure's scores [layers, k] of the rows at `positions`, softened and weighted."""
        if self.recall.soft:
            scores = softened(scores, positions)
        if self.recall.weight == "surprisal":
            scores = weighted(scores, self.surprisal_of(positions))
        return scores


def _once(rows: Rows) -> Blocks:
    return lambda: iter([rows])


def _is_among(some: Positions, others: Positions) -> NDArray[np.bool_]:
    """Which of some positions [n] are among others [k]; both are ascending."""
    if not len(others):
        return np.zeros(len(some), bool)
    at = np.searchsorted(others, some).clip(max=len(others) - 1)
    among: NDArray[np.bool_] = others[at] == some
    return among


def _archived_near(positions: Positions, span: int, archived: Positions) -> Positions:
    """These positions and up to `span` before and after each, as far as they are archived."""
    near = [positions + away for away in range(-span, span + 1)]
    found = united([one[one >= 0] for one in near])
    return found[_is_among(found, archived)]


def _shares(proposed: NDArray[np.bool_], total: int) -> Tensor:
    """How many of all `total` rows each candidate [n] stands for: a proposed one for itself."""
    shares = torch.ones(len(proposed))
    others = torch.from_numpy(~proposed)
    shares[others] = (total - int(proposed.sum())) / max(1, int(others.sum()))
    return shares
