"""Score archived rows for a query: all of them, or exactly those that an index proposes.

With an index, an even sample of all rows is scored too. It tells the lowest score, and stands in
the softmax of `attention` for the rows that were not proposed.
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
from sirchat.memory.index import WORTHWHILE, Index, SurprisalOf, evenly, is_available
from sirchat.memory.recall import Query, Recall, score, softened, weighted
from sirchat.memory.segments import Positions

SAMPLE = 8_192
"""Rows that stand for those that were not proposed."""


@dataclass(frozen=True)
class Ranked:
    """Candidates at `positions` [n], ascending, and their scores [layers, n]."""

    positions: Positions
    scores: Tensor


def wants_index(recall: Recall, rows: int) -> bool:
    """Whether this many archived rows are searched through an index."""
    if recall.index == "off" or recall.measure == "random" or recall.scope == "layer":
        return False
    return recall.index == "on" or (rows > WORTHWHILE and is_available())


def rank_all(
    archive: Archive,
    archived: Positions,
    query: Query,
    recall: Recall,
    rotations: Sequence[LayerRotation],
    surprisal_of: SurprisalOf,
) -> Ranked:
    """The scores of all rows at `archived` [n], ascending, which must be stored."""
    blocks = partial(archive.blocks, archived)
    order = np.argsort(np.concatenate([rows.positions for rows in blocks()]))
    scores = score(recall.measure, query, blocks, rotations)[:, torch.from_numpy(order)]
    return Ranked(archived, _finished(scores, archived, recall, surprisal_of))


def rank_proposed(
    archive: Archive,
    archived: Positions,
    query: Query,
    recall: Recall,
    rotations: Sequence[LayerRotation],
    surprisal_of: SurprisalOf,
) -> Ranked:
    """The scores of those rows at `archived` [n], ascending and stored, that are likely the best.

    The archive's index is made, or brought up to date.
    """
    index = _index(archive, recall, rotations)
    index.update(archive, archived, surprisal_of)
    sample = evenly(archived, SAMPLE)
    attends = recall.measure == "attention"
    lowest = 0.0
    if not attends and recall.weight == "surprisal":
        rows = archive.fetch(sample)
        lowest = float(score(recall.measure, query, lambda: iter([rows]), rotations).amin(1).mean())
    found = _with_neighbours(index.propose(query, lowest), max(recall.span, recall.soft))
    proposed = _among(found, archived)
    positions = np.union1d(proposed, sample)
    shares = _shares(np.isin(positions, proposed), len(archived)) if attends else None
    rows = archive.fetch(positions, values=not attends)
    scores = score(recall.measure, query, lambda: iter([rows]), rotations, shares)
    return Ranked(positions, _finished(scores, positions, recall, surprisal_of))


def _finished(
    scores: Tensor, positions: Positions, recall: Recall, surprisal_of: SurprisalOf
) -> Tensor:
    """A measure's scores [layers, n] of the rows at `positions`, softened and weighted."""
    if recall.soft:
        scores = softened(scores, positions)
    if recall.weight == "surprisal":
        scores = weighted(scores, surprisal_of(positions))
    return scores


def _index(archive: Archive, recall: Recall, rotations: Sequence[LayerRotation]) -> Index:
    if archive.index is None or not archive.index.is_for(recall):
        archive.index = Index(recall, rotations)
    return archive.index


def _among(found: Positions, archived: Positions) -> Positions:
    """Those found that are archived; both are ascending."""
    at = np.searchsorted(archived, found).clip(max=len(archived) - 1)
    among: Positions = found[archived[at] == found]
    return among


def _with_neighbours(positions: Positions, span: int) -> Positions:
    """These positions and up to `span` before and after each."""
    if not span:
        return positions
    return np.unique(positions[:, None] + np.arange(-span, span + 1))


def _shares(proposed: NDArray[np.bool_], total: int) -> Tensor:
    """How many of all `total` rows each candidate [n] stands for: a proposed one for itself."""
    shares = torch.ones(len(proposed))
    others = torch.from_numpy(~proposed)
    shares[others] = (total - int(proposed.sum())) / max(1, int(others.sum()))
    return shares
