"""Guesses the next tokens of a reply from earlier text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MATCH = 3  # how many newest tokens must have occurred before, if the last guess was right
_LONG = 8  # how many at the start, and if the last guess was wrong
_WITHIN = 2**14  # newest tokens that are searched
_BRIEF, _WHOLE = 5, 15  # tokens guessed after a short and after a long match
_PAYS = 3  # minimum number of right tokens with which the larger pass saves time
_LONGEST_REST = 256  # maximum number of tokens for which nothing is guessed


class PromptLookup:
    """Guesses the next tokens of one reply: those that followed the same text earlier.

    After a wrong guess it pauses for some tokens; each further one in a row doubles the pause.
    """

    def __init__(self) -> None:
        self._least = _LONG
        self._rest = 0  # tokens for which nothing is guessed
        self._next_rest = 8

    def guess(self, ids: NDArray[Any], token_id: int, most: int) -> list[int]:
        """At most `most` ids that may follow `token_id`, which follows the `ids` [seen]."""
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
        """Adapt later guesses to the last one, of which the first `right` tokens were right."""
        self._least = _MATCH if right >= _PAYS else _LONG
        if right >= _PAYS:
            self._next_rest = 8
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)


def _longest_match(ids: NDArray[Any]) -> tuple[int, int]:
    """The longest run at the end of `ids` that also occurs earlier: where it ends, its length.

    The length is at most eight; (0, 0) if fewer than three ids match.
    """
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    ends = ends[ends >= _MATCH - 1]
    length, best = 1, 0
    while len(ends) and length < _LONG:
        if length >= _MATCH:
            best = int(ends[-1])
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[-1 - length]]
        if len(ends):
            length += 1
    if len(ends) and length >= _MATCH:
        best = int(ends[-1])
    return (best + 1, length) if length >= _MATCH else (0, 0)
