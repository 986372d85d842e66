"""Guesses the next tokens from what the conversation said before (prompt lookup decoding).

A long talk repeats itself: names, lists, code, quotations. Where the newest tokens have stood
before, what followed them there is a guess. One forward pass checks a whole guess, and what the
model would have said anyway need not be computed again. The text stays the same, but for rounding:
a token is taken from the guess only if it is the one that is drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MATCH = 3  # newest tokens that must have stood before, after a guess that was right
_LONG = 8  # the same at first, and after a guess in vain
_WITHIN = 2**14  # newest tokens that are searched
_BRIEF, _WHOLE = 5, 15  # tokens guessed behind a short and behind a long match
_PAYS = 3  # right tokens that make up for the larger pass
_LONGEST_REST = 256  # tokens


class PromptLookup:
    """Guesses during one reply; the more often in vain, the longer it rests."""

    def __init__(self) -> None:
        self._least = _LONG
        self._rest = 0  # tokens for which nothing is guessed
        self._next_rest = 8

    def guess(self, ids: NDArray[Any], token_id: int, most: int) -> list[int]:
        """At most `most` tokens that may follow `token_id`, which follows `ids` [seen]."""
        if self._rest:
            self._rest -= 1
            return []
        if most < _PAYS:
            return []
        recent = np.append(ids[-_WITHIN:], token_id)
        at, length = _longest_match(recent)
        if length < self._least:
            return []
        count = min(most, _WHOLE if length == _LONG else _BRIEF)
        guessed: list[int] = recent[at : at + count].tolist()
        return guessed if len(guessed) >= _PAYS else []

    def learn(self, right: int) -> None:
        """Note how many tokens of a guess were right."""
        self._least = _MATCH if right >= _PAYS else _LONG
        if right >= _PAYS:
            self._next_rest = 8
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)


def _longest_match(ids: NDArray[Any]) -> tuple[int, int]:
    """Where the tokens stand that followed the newest ones before, and how many of these match.

    The longest match, and of several the newest one; (0, 0) if not even three tokens match.
    """
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    ends = ends[ends >= _MATCH - 1]
    length, best = 1, 0
    while len(ends) and length < _LONG:
        if length >= _MATCH:
            best = int(ends[-1])
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[-1 - length]]
        length += bool(len(ends))
    if len(ends) and length >= _MATCH:
        best = int(ends[-1])
    return (best + 1, length) if length >= _MATCH else (0, 0)
