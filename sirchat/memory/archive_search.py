"""A search of the archive: scores its rows (one per token), or only those that an index proposes.

An index proposes rows that probably score highest; these are then scored exactly. An evenly spaced
sample of all rows is scored, too. With the retriever `attention`, the sample stands for all rows
that are not proposed when the softmax is computed; with other retrievers, the sample gives an
estimate of the lowest score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.archive import Archive
from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.index import AUTO_INDEX_ROWS, Index, SurprisalOf, evenly, is_available
from sirchat.memory.ledger import Ledger
from sirchat.memory.recall import retriever
from sirchat.memory.recall.base import Retriever
from sirchat.memory.retrieval import Candidates, Query, RecallSettings, softened, weighted
from sirchat.memory.segments import Positions, united

SAMPLE = 32_768
"""Number of sampled rows that represent, in the softmax of retriever `attention`, all rows that the
index does not propose."""

LOWEST_OF = 16_384, 65_536
"""Minimum and maximum size of the sample from which the lowest score is estimated.

Between these limits, the sample has the fraction `_PART` of all rows.
"""

_PART = 1 / 16
_BATCH = 8_192  # rows fetched at once


@dataclass(frozen=True)
class Ranked:
    """Archived tokens at stream `positions` [n], ascending, and their `scores` [layers, n]."""

    positions: Positions
    scores: Tensor


def wants_index(recall: RecallSettings, rows: int) -> bool:
    """Whether an archive of `rows` rows should be searched through an index."""
    can = retriever(recall.retriever).index_probes and recall.scope != "layer"
    if recall.index == "off" or not can:
        return False
    return recall.index == "on" or (rows > AUTO_INDEX_ROWS and is_available())


@dataclass(frozen=True)
class ArchiveSearch:
    """One search of the archive for the tokens (rows) that a turn needs.

    Attributes:
        archive: where the rows are stored.
        archived: stream positions [n], ascending, of the rows to score; all are in the archive.
        query: the tokens with which the rows are compared, usually the new turn.
        recall: settings of recall.
        rotations: rotary position embedding of each layer of the model.
        surprisal_of: gives the surprisals [k], in nats, of rows at stream positions [k].
        ledger: the table of all tokens; may be None where only keys and values are compared.
    """

    archive: Archive
    archived: Positions
    query: Query
    recall: RecallSettings
    rotations: Sequence[LayerRotation]
    surprisal_of: SurprisalOf
    ledger: Ledger | None = None

    @cached_property
    def retriever(self) -> Retriever:
        """The retriever that scores the rows."""
        return retriever(self.recall.retriever)

    def all(self) -> Ranked:
        """The scores of all rows whose positions are in `self.archived`."""
        scores = self.retriever.score(self._candidates(self.archived))
        return Ranked(self.archived, self._finished(scores, self.archived))

    def proposed(self) -> Ranked:
        """The scores of the rows that the archive's index proposes, and of a sample of all rows.

        Before that, the index is built, or the rows that it does not have yet are added.
        """
        archive, recall = self.archive, self.recall
        if archive.index is None or not archive.index.is_for(recall):
            archive.index = Index(recall, self.rotations)
        archive.index.update(archive, self.archived, self.surprisal_of)
        rank = self._by_softmax if self.retriever.needs_queries else self._by_similarity
        ranked = rank(archive.index)
        return Ranked(ranked.positions, self._finished(ranked.scores, ranked.positions))

    def _by_softmax(self, index: Index) -> Ranked:
        """Scores of the proposed rows and of a sample of all rows, from one softmax over both."""
        near = max(self.recall.span, int(self.recall.soft))
        proposed = _archived_near(index.propose(self.query), near, self.archived)
        positions = united((proposed, evenly(self.archived, SAMPLE)))
        candidates = replace(
            self._candidates(positions),
            counts=_counts(_is_among(positions, proposed), len(self.archived)),
            fetched=self.archive.fetch(positions, values=False),
        )
        return Ranked(positions, self.retriever.score(candidates))

    def _by_similarity(self, index: Index) -> Ranked:
        """Scores of the rows that the index proposes.

        If scores are weighted by surprisal, archived rows at even distances are scored, too: the
        weights need the lowest score of all rows, which is estimated from these.
        """
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
        """The retriever's scores [layers, k] for the rows at `positions` [k]; works in batches."""
        scores = [torch.zeros(len(self.rotations), 0)]
        for start in range(0, len(positions), _BATCH):
            batch = positions[start : start + _BATCH]
            rows = self.archive.fetch(batch)
            scores.append(self.retriever.score(replace(self._candidates(batch), fetched=rows)))
        return torch.cat(scores, dim=1)

    def _candidates(self, positions: Positions) -> Candidates:
        return Candidates(self.archive, positions, self.query, self.rotations, self.ledger)

    def _finished(self, scores: Tensor, positions: Positions) -> Tensor:
        """The final scores [layers, k] of the rows at `positions` [k].

        They are the retriever's `scores` [layers, k]. If the settings say so, these are made more
        even (`softened`), and then multiplied by surprisal.
        """
        if self.recall.soft:
            scores = softened(scores, positions)
        if self.recall.weight == "surprisal":
            scores = weighted(scores, self.surprisal_of(positions))
        return scores


def _is_among(positions: Positions, others: Positions) -> NDArray[np.bool_]:
    """Mask [n]: which of the `positions` [n] are also in `others` [k]; both are ascending."""
    if not len(others):
        return np.zeros(len(positions), bool)
    at = np.searchsorted(others, positions).clip(max=len(others) - 1)
    mask: NDArray[np.bool_] = others[at] == positions
    return mask


def _archived_near(positions: Positions, span: int, archived: Positions) -> Positions:
    """The `archived` positions that equal one of `positions` or are at most `span` away from one.

    All are stream positions.
    """
    shifted = [positions + offset for offset in range(-span, span + 1)]
    near = united([part[part >= 0] for part in shifted])
    return near[_is_among(near, archived)]


def _counts(proposed: NDArray[np.bool_], total: int) -> Tensor:
    """How many of the `total` archived rows each candidate [n] represents.

    A candidate in the mask `proposed` [n] represents only itself. Each other candidate represents
    an equal part of the archived rows that are not proposed.
    """
    counts = torch.ones(len(proposed))
    others = torch.from_numpy(~proposed)
    counts[others] = (total - int(proposed.sum())) / max(1, int(others.sum()))
    return counts
