"""What a search for passages has found, and how its turns are described."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirchat.engine.engine import Engine
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import State
from sirchat.recall import RecalledTurn
from sirchat.recall.passage_search import PassageQuery, PassageSearch
from sirchat.recall.passages import texts_at
from sirchat.text.detokenizer import text_with_gaps


@dataclass(frozen=True)
class SearchResult:
    """Archived tokens and their scores."""

    positions: Positions  # [n], ascending
    scores: NDArray[np.float64]  # [n]


@dataclass(frozen=True)
class FoundPassages:
    """The passages that fit a message, held or archived, and how well they fit."""

    result: SearchResult
    passages: tuple[int, ...]  # numbers, best first
    word_scores: tuple[float, ...]  # of each: by the words of the message
    fits_best: tuple[bool, ...]  # of each: whether it fits the best passage, and not the message
    query: PassageQuery
    best_score: float  # the highest of any passage, in standard deviations
    is_question: bool  # whether the message is answered from these passages alone

    def reason(self, index: int) -> str:
        """Why passage number `index` of these was found."""
        if self.fits_best[index]:
            return "words of the best"
        if self.word_scores[index] > 0:
            return "words beside it"
        return "its meaning" if self.query.vector is not None else ""


def describe_turns(
    engine: Engine,
    search: PassageSearch,
    found: FoundPassages | None,
    restored: Positions,
    *,
    with_gaps: bool = False,
) -> tuple[RecalledTurn, ...]:
    """The turns of restored tokens, with the text and shared words of each turn's best passage.

    `with_gaps`: with … for what is not held now.
    """
    ledger, passages = engine.ledger, search.passages
    of_tokens = ledger.column("turn")[restored]
    bits = engine.store.archive.bits(restored)
    best = dict[int, tuple[tuple[str, ...], str, str]]()
    for index, number in enumerate(found.passages if found else ()):
        assert found is not None
        turn = int(passages.rows["turn"][number])
        text = passages.texts(ledger, number, number + 1)[0]
        words = search.index.shared_words(text, found.query.text)
        reason = "" if words else found.reason(index)
        rows = passages.shown_tokens(ledger, number)
        pieces = texts_at(ledger, passages.token_texts, rows)
        is_held = ledger.column("state")[rows] == State.HELD
        best.setdefault(turn, (words, text_with_gaps(pieces, is_held | (not with_gaps)), reason))
    described = list[RecalledTurn]()
    for turn in np.unique(of_tokens).tolist():
        own = bits[of_tokens == turn]
        words, text, reason = best.get(turn, ((), "", ""))
        fewest = min(set(own.tolist()) - {0}, default=0)
        described.append(RecalledTurn(turn, len(own), words, text, fewest, reason))
    return tuple(described)
