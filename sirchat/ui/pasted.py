"""Text that was pasted: which of its signs are in the typed text, and how it must be typed."""

from __future__ import annotations

import re
from bisect import bisect_left

FENCE = '"""'  # opens and closes a block of typed lines
_WORD = re.compile(r"@\S+")


class PastedAtSigns:
    """Knows which `@` signs of the typed text were pasted; call `update` after each change.

    A pasted word that is inserted again whole (from history, by undo or yank) counts as pasted.
    """

    def __init__(self) -> None:
        self._words = set[str]()
        self.reset()

    def reset(self) -> None:
        """Start again with an empty text; words that were pasted earlier are still known."""
        self._text = ""
        self.indices = frozenset[int]()  # of all `@` in the text that were pasted

    def update(self, text: str, *, pasted: bool = False) -> int:
        """Take the text after a change; `pasted`: whether the new part was pasted, not typed.

        Returns how many characters came and went.
        """
        old = self._text
        start = _common_length(old, text)
        tail = _common_length(old[start:][::-1], text[start:][::-1])
        end, shift, new = len(old) - tail, len(text) - len(old), text[start : len(text) - tail]
        stay = {index for index in self.indices if index < start}
        stay |= {index + shift for index in self.indices if index >= end}
        if pasted:
            self._words |= set(_WORD.findall(new))
            stay |= {index for index, char in enumerate(new, start) if char == "@"}
        elif len(new) > 1:  # more than a key types
            words = (word for word in _WORD.finditer(new) if self._was_pasted(word[0]))
            stay |= {start + word.start() for word in words}
        self._text, self.indices = text, frozenset(stay)
        return len(new) + end - start

    def _was_pasted(self, word: str) -> bool:
        """Whether a pasted word equals `word`, begins with it, or is its beginning."""
        return any(word.startswith(known) or known.startswith(word) for known in self._words)


def escape_message(message: str) -> str:
    """How a message must be typed, which no sign of it may turn into something else."""
    if message.lstrip().startswith("/"):
        return f"/{message.lstrip()}"
    is_block = message.lstrip().startswith(FENCE) or message.endswith("\\")
    return f"{FENCE}\n{message}\n{FENCE}" if is_block else message


def _common_length(left: str, right: str) -> int:
    """Number of equal characters at the beginning of two texts, which may be long."""
    lengths = range(1, min(len(left), len(right)) + 1)
    return bisect_left(lengths, True, key=lambda length: left[:length] != right[:length])
