"""A search of the archive: scores evicted tokens (rows), so that the best can be restored.

Without a search index, all rows are scored. An index proposes the rows that probably score highest;
then only the proposed rows are scored exactly, and a sample of all rows at even distances. With the
retriever `attention`, the sample represents all rows that are not proposed when the softmax is
computed. With other retrievers, the lowest score of all rows is estimated from the sample.
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
"""Number of rows in the sample that the retriever `attention` takes.

In its softmax, the sample represents all archived rows that the search index does not propose.
"""

LOWEST_OF = 16_384, 65_536
"""Minimum and maximum number of rows in the sample from which the lowest score is estimated.

Between these limits, the sample has a sixteenth of all archived rows.
"""

_PART = 1 / 16
_BATCH = 8_192  # rows fetched at once


@dataclass(frozen=True)
class Ranked:
    """The result of scoring n archived tokens.

    `positions` [n] are the tokens' stream positions, ascending. `scores` [layers, n] are their
    scores in each layer, or [1, n] if all layers have the same.
    """

    positions: Positions
    scores: Tensor


def wants_index(recall: RecallSettings, rows: int) -> bool:
    """Whether the settings `recall` say to search an archive of `rows` rows by a search index."""
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
        """The retriever, the object that scores archived rows for the search."""
        return retriever(self.recall.retriever)

    def all(self) -> Ranked:
        """Score all archived rows whose positions are in `self.archived`; returns the scores."""
        scores = self.retriever.score(self._candidates(self.archived))
        return Ranked(self.archived, self._finished(scores, self.archived))

    def proposed(self) -> Ranked:
        """Score the archived rows that the archive's search index proposes; returns the scores.

        A sample of all rows may be scored, too. Before the search, the index is built if necessary,
        and rows that the index lacks are added to it.
        """
        archive, recall = self.archive, self.recall
        if archive.index is None or not archive.index.is_for(recall):
            archive.index = Index(recall, self.rotations)
        archive.index.update(archive, self.archived, self.surprisal_of)
        rank = self._by_softmax if self.retriever.needs_queries else self._by_similarity
        ranked = rank(archive.index)
        return Ranked(ranked.positions, self._finished(ranked.scores, ranked.positions))

    def _by_softmax(self, index: Index) -> Ranked:
        """Score the rows that the search index proposes, for the retriever `attention`.

        A sample of all archived rows is scored, too. One softmax over the proposed rows and the
        sample gives all scores.
        """
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
        """Score the rows that the search index proposes, for a retriever by similarity.

        If scores are weighted by surprisal, a sample of archived rows at even distances is scored,
        too. From the sample, the lowest score of all rows is estimated, which the weighting needs.
        Returns the scores of the proposed rows and of the sample.
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
        """Compute the retriever's scores of the archived rows at stream `positions` [k].

        Rows are read from the archive in batches. Returns the scores [layers, k].
        """
        scores = [torch.zeros(len(self.rotations), 0)]
        for start in range(0, len(positions), _BATCH):
            batch = positions[start : start + _BATCH]
            rows = self.archive.fetch(batch)
            scores.append(self.retriever.score(replace(self._candidates(batch), fetched=rows)))
        return torch.cat(scores, dim=1)

    def _candidates(self, positions: Positions) -> Candidates:
        return Candidates(self.archive, positions, self.query, self.rotations, self.ledger)

    def _finished(self, scores: Tensor, positions: Positions) -> Tensor:
        """The final scores [layers, k] of the archived rows at stream `positions` [k].

        They are computed from the retriever's `scores` [layers, k]. With the setting `soft`, the
        scores are made more even (see `softened`). Then, with the setting `weight: surprisal`, they
        are multiplied by the tokens' surprisal.
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
    """The archived tokens among given tokens and their neighbours.

    `positions` are the stream positions of the given tokens; tokens at most `span` before or after
    a given token are its neighbours. `archived` are the positions of all archived tokens. Returns
    stream positions, ascending.
    """
    shifted = [positions + offset for offset in range(-span, span + 1)]
    near = united([part[part >= 0] for part in shifted])
    return near[_is_among(near, archived)]


def _counts(proposed: NDArray[np.bool_], total: int) -> Tensor:
    """How many of the `total` archived rows each of n candidate rows represents in a softmax.

    A candidate that the search index has proposed (mask `proposed` [n]) represents only itself.
    Each other candidate represents an equal part of the archived rows that are not proposed.
    Returns numbers [n].
    """
    counts = torch.ones(len(proposed))
    others = torch.from_numpy(~proposed)
    counts[others] = (total - int(proposed.sum())) / max(1, int(others.sum()))
    return counts
