"""Retriever `hybrid`: scores whole turns by shared words and by similar keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sirchat.recall.retrievers.base import TurnRetriever, unit, with_neighbours

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from sirchat.recall.candidates import Candidates

KEYS = 0.4  # weight of a turn's score by keys; that of its score by words is 1


class Hybrid(TurnRetriever):
    """Scores whole turns by the words that they share with the new turn, and by similar keys.

    The weighted sum of both scores, each in standard deviations from its mean over the archived
    turns. The keys are those of the middle layer.
    """

    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        words, layer = candidates.query.words, len(candidates.rotations) // 2
        sought = candidates.query_pair(layer)[0]  # [H, m, D]
        if candidates.query.of_template is not None:
            sought = sought[:, ~candidates.query.of_template]
        if not sought.shape[1]:
            return words
        among = np.unique(candidates.turns)
        keys = np.zeros(len(words))
        keys[among] = _by_keys(candidates, layer, unit(sought))
        return _standard(words, among) + _standard(with_neighbours(keys), among) * KEYS


def _by_keys(candidates: Candidates, layer: int, sought: Tensor) -> NDArray[np.float64]:
    # After ColBERT: for each key of the new turn the largest cosine with a key of an earlier turn.
    turns = candidates.turns
    starts = np.flatnonzero(np.diff(turns, prepend=-1))
    number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(turns)))
    nearest = np.full((sought.shape[1], len(starts)), -np.inf, np.float32)  # [m, turns]
    done = 0
    for keys, _ in candidates.pairs(layer):
        part = slice(done, done := done + keys.shape[1])
        cosines = (sought @ unit(keys).to(sought.device).mT).mean(0).cpu().numpy()  # [m, k]
        first = np.flatnonzero(np.diff(number[part], prepend=-1))
        here = number[part][first]
        highest = np.maximum.reduceat(cosines, first, axis=1)
        nearest[:, here] = np.maximum(nearest[:, here], highest)
    # In standard deviations, so that a key similar to every turn counts no more than other keys.
    deviation = nearest.std(1, keepdims=True)
    standard = (nearest - nearest.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    scores: NDArray[np.float64] = standard.sum(0).astype(np.float64)
    return scores


def _standard(scores: NDArray[np.float64], among: NDArray[np.int64]) -> NDArray[np.float64]:
    """The scores in standard deviations from the mean over the turns `among`."""
    deviation = float(scores[among].std())
    standard: NDArray[np.float64] = (scores - scores[among].mean()) / (deviation or np.inf)
    return standard
