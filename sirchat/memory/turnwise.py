"""Scores of whole turns, for the recall measures `bm25` and `hybrid`.

What answers a question is told in a sentence; single tokens of it, however well they match, don't
tell it. So these measures score turns, and every archived token of a turn gets the turn's score.

`bm25` takes scores by words, which are counted elsewhere: nothing here knows text. `hybrid` adds
how close the turn's keys come to those of each archived turn, as first written in the middle layer,
with the rotary position undone: the largest cosine for each token of the query (late interaction,
ColBERT, https://arxiv.org/abs/2004.12832).

Either score is shared with the turns beside it: an answer often stands next to what the question
matches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.archive import Archive
from sirchat.memory.cache import LayerRotation
from sirchat.memory.recall import unit, unrotated
from sirchat.memory.segments import Positions, Rows

Scores = NDArray[np.float64]

NEIGHBOUR = 0.5
"""Part of a turn's score that is added to each of the two turns beside it."""

KEYS = 0.4
"""Weight of the keys in `hybrid`; that of the words is 1."""

_BATCH = 8_192  # rows fetched at once


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
