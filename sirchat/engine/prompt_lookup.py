"""Guesses the next tokens of a reply from earlier text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHORT_MATCH = 3  # how many newest tokens must have occurred before, if the last guess was right
_LONG_MATCH = 8  # how many at the start, and if the last guess was wrong
_SEARCHED_TOKENS = 2**14  # newest tokens that are searched
_SHORT_GUESS, _LONG_GUESS = 5, 15  # tokens guessed after a short and after a long match
_MIN_USEFUL_TOKENS = 3  # minimum number of right tokens with which the larger pass saves time
_MAX_PAUSE = 256  # maximum number of tokens for which nothing is guessed


class PromptLookup:
    """Guesses the next tokens of one reply: those that followed the same text earlier.

    Guessing pauses after a wrong guess. The pause doubles with each further wrong one in a row.
    """

    def __init__(self) -> None:
        self._min_match = _LONG_MATCH
        self._pause = 0  # tokens for which nothing is guessed
        self._next_pause = 8

    def guess(self, ids: NDArray[Any], token_id: int, max_tokens: int) -> list[int]:
        """At most `max_tokens` ids that may follow the stream `ids` [seen] and then `token_id`."""
        if self._pause:
            self._pause -= 1
            return []
        if max_tokens < _MIN_USEFUL_TOKENS:
            return []
        recent = np.append(ids[-_SEARCHED_TOKENS:], token_id)
        match_end, length = _longest_match(recent)
        if length < self._min_match:
            return []
        count = min(max_tokens, _LONG_GUESS if length == _LONG_MATCH else _SHORT_GUESS)
        guessed: list[int] = recent[match_end : match_end + count].tolist()
        return guessed if len(guessed) >= _MIN_USEFUL_TOKENS else []

    def learn(self, num_right: int) -> None:
        """Adapt to the last guess, of which the first `num_right` tokens were right."""
        self._min_match = _SHORT_MATCH if num_right >= _MIN_USEFUL_TOKENS else _LONG_MATCH
        if num_right >= _MIN_USEFUL_TOKENS:
            self._next_pause = 8
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)


def _longest_match(ids: NDArray[Any]) -> tuple[int, int]:
    """End and length (3 to 8) of the longest earlier copy of the end of `ids`; (0, 0) if none."""
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    ends = ends[ends >= _SHORT_MATCH - 1]
    length, best = 1, 0
    while len(ends) and length < _LONG_MATCH:
        if length >= _SHORT_MATCH:
            best = int(ends[-1])
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[-1 - length]]
        if len(ends):
            length += 1
    if len(ends) and length >= _SHORT_MATCH:
        best = int(ends[-1])
    return (best + 1, length) if length >= _SHORT_MATCH else (0, 0)
