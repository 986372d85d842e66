"""Which `@` signs at the prompt were pasted: text from elsewhere must not name files to be read."""

from __future__ import annotations

import re

_WORD = re.compile(r"@\S+")


class PastedSigns:
    """Follows a text as it is edited, and knows which of its `@` signs were pasted.

    A pasted word that comes back at once, from the history, by undo or by yank, stays pasted.
    """

    def __init__(self) -> None:
        self._words = set[str]()
        self.begin()

    def begin(self) -> None:
        """The text is empty, and a new one begins."""
        self._text = ""
        self._signs = frozenset[int]()

    @property
    def indices(self) -> frozenset[int]:
        """Where in the text the pasted signs are."""
        return self._signs

    def changed(self, text: str, *, pasted: bool = False) -> None:
        """Note the text as it is now; what is new in it was typed, or `pasted`."""
        old = self._text
        start = _common_length(old, text)
        tail = _common_length(old[start:][::-1], text[start:][::-1])
        end, shift, new = len(old) - tail, len(text) - len(old), text[start : len(text) - tail]
        stay = {index for index in self._signs if index < start}
        stay |= {index + shift for index in self._signs if index >= end}
        if pasted:
            self._words |= set(_WORD.findall(new))
            stay |= {index for index, char in enumerate(new, start) if char == "@"}
        elif len(new) > 1:  # more than a key types
            found = (one for one in _WORD.finditer(new) if self._was_pasted(one[0]))
            stay |= {start + one.start() for one in found}
        self._text, self._signs = text, frozenset(stay)

    def _was_pasted(self, word: str) -> bool:
        """Whether a word was pasted before, or more or less of it."""
        return any(word.startswith(one) or one.startswith(word) for one in self._words)


def _common_length(left: str, right: str) -> int:
    """Length of the common prefix; by halves, as texts may be long."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
