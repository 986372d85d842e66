"""Scores of archived rows for a query: of all rows, of those an index proposes, of whole turns.

Proposed rows get their exact scores. With an index, an evenly spaced sample of all rows is scored
too: under `attention` it represents the other rows in the softmax, under the other measures it
estimates the lowest score.
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
from sirchat.memory.index import AUTO_INDEX_ROWS, Index, SurprisalOf, evenly, is_available, united
from sirchat.memory.recall import (
    BY_TURN,
    Blocks,
    Query,
    RecallSettings,
    score,
    softened,
    unit,
    unrotated,
    weighted,
)
from sirchat.memory.segments import Positions, Rows

SAMPLE = 32_768
"""Size of the sample that represents the rows not proposed in the softmax of `attention`."""

LOWEST_OF = 16_384, 65_536
"""Least and greatest size of the sample that estimates the lowest score; `_PART` of all between."""

_PART = 1 / 16
_BATCH = 8_192  # rows fetched at once


@dataclass(frozen=True)
class Ranked:
    """Scores [layers, n] of candidate rows at stream positions [n], ascending."""

    positions: Positions
    scores: Tensor


def wants_index(recall: RecallSettings, rows: int) -> bool:
    """Whether this many archived rows should be searched through an index."""
    exact = recall.measure in BY_TURN or recall.measure == "random"
    if recall.index == "off" or exact or recall.scope == "layer":
        return False
    return recall.index == "on" or (rows > AUTO_INDEX_ROWS and is_available())


@dataclass(frozen=True)
class Ranking:
    """One search of the archive.

    Attributes:
        archive: where the rows are stored.
        archived: stream positions [n], ascending, of the rows to score; all are in the archive.
        query: what they are scored against.
        recall: measure, weight and index settings.
        rotations: one entry per layer of the model.
        surprisal_of: gives the surprisals [k], in nats, of rows at stream positions [k].
    """

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
        """The scores of the rows that the archive's index proposes, and of a sample.

        The index is built first, or brought up to date.
        """
        archive, recall = self.archive, self.recall
        if archive.index is None or not archive.index.is_for(recall):
            archive.index = Index(recall, self.rotations)
        archive.index.update(archive, self.archived, self.surprisal_of)
        rank = self._attended if recall.measure == "attention" else self._similar
        ranked = rank(archive.index)
        return Ranked(ranked.positions, self._finished(ranked.scores, ranked.positions))

    def _attended(self, index: Index) -> Ranked:
        """Scores by `attention`, whose softmax is over the proposed rows and a sample."""
        near = max(self.recall.span, int(self.recall.soft))
        proposed = _archived_near(index.propose(self.query), near, self.archived)
        positions = united((proposed, evenly(self.archived, SAMPLE)))
        shares = _shares(_is_among(positions, proposed), len(self.archived))
        rows = self.archive.fetch(positions, values=False)
        return Ranked(positions, self._score(_once(rows), shares))

    def _similar(self, index: Index) -> Ranked:
        """Scores by the other measures; a sample gives the lowest score, which weighting needs."""
        least, most = LOWEST_OF
        weighted = self.recall.weight == "surprisal"
        count = int(np.clip(_PART * len(self.archived), least, most))
        sample = evenly(self.archived, count if weighted else 0)
        sampled = self._scores_of(sample)
        lowest = float(sampled.amin(1).mean()) if weighted else 0.0
        proposed = index.propose(self.query, lowest)
        proposed = _archived_near(proposed, self.recall.span, self.archived)
        new = proposed[~_is_among(proposed, sample)]
        positions = np.concatenate([sample, new])
        order = np.argsort(positions)
        scores = torch.cat([sampled, self._scores_of(new)], dim=1)[:, torch.from_numpy(order)]
        return Ranked(positions[order], scores)

    def _scores_of(self, positions: Positions) -> Tensor:
        """Scores [layers, k] by the measure alone, computed a batch of rows at a time."""
        scores = [torch.zeros(len(self.rotations), 0)]
        for start in range(0, len(positions), _BATCH):
            rows = self.archive.fetch(positions[start : start + _BATCH])
            scores.append(self._score(_once(rows)))
        return torch.cat(scores, dim=1)

    def _score(self, blocks: Blocks, shares: Tensor | None = None) -> Tensor:
        return score(self.recall.measure, self.query, blocks, self.rotations, shares)

    def _finished(self, scores: Tensor, positions: Positions) -> Tensor:
        """Scores [layers, k] of the rows at `positions` [k], softened and weighted as set."""
        if self.recall.soft:
            scores = softened(scores, positions)
        if self.recall.weight == "surprisal":
            scores = weighted(scores, self.surprisal_of(positions))
        return scores


def _once(rows: Rows) -> Blocks:
    return lambda: iter([rows])


def _is_among(positions: Positions, others: Positions) -> NDArray[np.bool_]:
    """Mask of the positions [n] that are among others [k]; both are ascending."""
    if not len(others):
        return np.zeros(len(positions), bool)
    at = np.searchsorted(others, positions).clip(max=len(others) - 1)
    mask: NDArray[np.bool_] = others[at] == positions
    return mask


def _archived_near(positions: Positions, span: int, archived: Positions) -> Positions:
    """The archived ones among these positions and up to `span` before and after each."""
    shifted = [positions + offset for offset in range(-span, span + 1)]
    near = united([part[part >= 0] for part in shifted])
    return near[_is_among(near, archived)]


def _shares(proposed: NDArray[np.bool_], total: int) -> Tensor:
    """How many of all `total` rows each candidate [n] represents: a proposed one only itself."""
    shares = torch.ones(len(proposed))
    others = torch.from_numpy(~proposed)
    shares[others] = (total - int(proposed.sum())) / max(1, int(others.sum()))
    return shares


Scores = NDArray[np.float64]

NEIGHBOUR = 0.5
"""Part of a turn's score that is added to each of the two turns beside it."""

KEYS = 0.4
"""Weight of the keys in `hybrid`; that of the words is 1."""


@dataclass(frozen=True)
class ArchivedTurns:
    """The archived rows of a conversation, turn by turn.

    Attributes:
        archive: where the rows are stored.
        positions: their stream positions [n], ascending.
        turns: the turn [n] of each.
    """

    archive: Archive
    positions: Positions
    turns: NDArray[np.int64]

    def by_words(self, words: Scores) -> Tensor:
        """The scores [n] of `bm25`, from a score for each turn of the conversation."""
        return self._of_rows(plus_neighbours(words))

    def by_both(self, words: Scores, wanted: Rows, layer: int, rotation: LayerRotation) -> Tensor:
        """The scores [n] of `hybrid`, in standard deviations from the mean of the turns.

        Args:
            words: a score for each turn of the conversation.
            wanted: the query's rows of one layer.
            layer: that layer's number.
            rotation: of that layer.
        """
        among = np.unique(self.turns)
        keys = np.zeros(len(words))
        keys[among] = self._by_keys(wanted, layer, rotation)
        parts = (
            _standard(plus_neighbours(one), among) * weight
            for one, weight in ((words, 1.0), (keys, KEYS))
        )
        return self._of_rows(np.sum(list(parts), axis=0))

    def _by_keys(self, wanted: Rows, layer: int, rotation: LayerRotation) -> Scores:
        """How close each turn with archived rows [t] comes to the query's keys.

        For each of these keys, the turns' largest cosines are put in standard deviations from their
        mean, so that what is close to every turn counts no more than what is close to few.
        """
        sought = _directions(wanted, rotation)
        starts = np.flatnonzero(np.diff(self.turns, prepend=-1))
        nearest = np.full((sought.shape[1], len(starts)), -np.inf, np.float32)
        number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(self.turns)))
        for start in range(0, len(self.positions), _BATCH):
            part = slice(start, start + _BATCH)
            rows = self.archive.fetch(self.positions[part], layer)
            keys = _directions(rows, rotation).to(sought.device)
            cosines = (sought @ keys.mT).mean(0).cpu().numpy()  # [m, k]
            first = np.flatnonzero(np.diff(number[part], prepend=-1))
            here = number[part][first]
            highest = np.maximum.reduceat(cosines, first, axis=1)
            nearest[:, here] = np.maximum(nearest[:, here], highest)
        spread = nearest.std(1, keepdims=True)
        standard = (nearest - nearest.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1)
        scores: Scores = standard.sum(0).astype(np.float64)
        return scores

    def _of_rows(self, scores: Scores) -> Tensor:
        return torch.from_numpy(scores[self.turns])


def plus_neighbours(scores: Scores) -> Scores:
    """Scores [n] of consecutive turns, each with a part of those before and after it."""
    shared = scores.copy()
    shared[1:] += NEIGHBOUR * scores[:-1]
    shared[:-1] += NEIGHBOUR * scores[1:]
    return shared


def _standard(scores: Scores, among: NDArray[np.int64]) -> Scores:
    """Standard deviations from the mean of the turns `among` [k]; 0 where they are all equal."""
    spread = float(scores[among].std())
    standard: Scores = (scores - scores[among].mean()) / (spread or np.inf)
    return standard


def _directions(rows: Rows, rotation: LayerRotation) -> Tensor:
    """The keys of one layer's rows, unrotated and of length 1: [H, n, D]."""
    return unit(unrotated(rows.tensors[0], torch.from_numpy(rows.written_at), rotation.key))
