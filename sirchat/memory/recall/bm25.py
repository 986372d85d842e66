"""Whole turns, by the words that they have in common with the new turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirchat.memory.recall.base import TurnRetriever, with_neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sirchat.memory.retrieval import Candidates


class Bm25(TurnRetriever):
    """Whole turns, by the words that they have in common with the new turn.

    A turn's score is its score by words (`chat.recall.WordIndex`) plus a part of its neighbours'.
    """

    needs_turn = False

    def score_turns(self, candidates: Candidates) -> NDArray[np.float64]:
        return with_neighbours(candidates.words)
