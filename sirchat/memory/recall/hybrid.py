"""Retriever `hybrid`: scores whole turns by shared words and by similar keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sirchat.memory.recall.base import TurnRetriever, unit, with_neighbours

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from sirchat.memory.retrieval import Candidates

KEYS = 0.4
"""Weight of a turn's score by keys, in the sum of its scores by words (weight 1) and by keys."""


class Hybrid(TurnRetriever):
    """Scores whole turns by the words that they share with the new turn, and by similar keys.

    A turn's score is the weighted sum of a score by words and a score by keys, each in standard
    deviations from its mean over the archived turns. The keys are those of the middle layer.
    """

    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        words, layer = with_neighbours(candidates.words), len(candidates.rotations) // 2
        said = _said(candidates, layer)
        if not said.shape[1]:
            return words
        among = np.unique(candidates.turns)
        keys = np.zeros(len(words))
        keys[among] = _by_keys(candidates, layer, said)
        return _standard(words, among) + _standard(with_neighbours(keys), among) * KEYS


def _said(candidates: Candidates, layer: int) -> Tensor:
    """The keys [H, m, D] of the new turn's tokens in one layer, scaled to length 1.

    Tokens of the chat template are left out.
    """
    from sirchat.memory.retrieval import unrotated_keys

    keys = unrotated_keys(layer, candidates.query.rows, candidates.rotations[layer])
    of_template = candidates.query.of_template
    if of_template is not None:
        keys = keys[:, ~of_template]
    return unit(keys)


def _by_keys(candidates: Candidates, layer: int, sought: Tensor) -> NDArray[np.float64]:
    """Score the t turns that have archived tokens by the keys of the new turn; returns scores [t].

    `sought` [H, m, D] are the keys of the new turn's m tokens in one layer, scaled to length 1. The
    similarity of such a key to an earlier turn is the largest cosine with a key of that turn. It is
    expressed in standard deviations from its mean over all turns, so that a key that is similar to
    every turn counts no more than a key that is similar to few turns. A turn's score is the sum of
    the similarities of all m keys.
    """
    turns = candidates.turns
    starts = np.flatnonzero(np.diff(turns, prepend=-1))
    number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(turns)))
    nearest = np.full((sought.shape[1], len(starts)), -np.inf, np.float32)
    done = 0
    for keys in candidates.keys(layer):
        part = slice(done, done := done + keys.shape[1])
        cosines = (sought @ unit(keys).to(sought.device).mT).mean(0).cpu().numpy()  # [m, k]
        first = np.flatnonzero(np.diff(number[part], prepend=-1))
        here = number[part][first]
        highest = np.maximum.reduceat(cosines, first, axis=1)
        nearest[:, here] = np.maximum(nearest[:, here], highest)
    deviation = nearest.std(1, keepdims=True)
    standard = (nearest - nearest.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    scores: NDArray[np.float64] = standard.sum(0).astype(np.float64)
    return scores


def _standard(scores: NDArray[np.float64], among: NDArray[np.int64]) -> NDArray[np.float64]:
    """Express the scores of all turns in standard deviations from their mean.

    Mean and standard deviation are those of the turns with the numbers `among` [k]. If the scores
    of these turns are equal, all results are 0.
    """
    deviation = float(scores[among].std())
    standard: NDArray[np.float64] = (scores - scores[among].mean()) / (deviation or np.inf)
    return standard
