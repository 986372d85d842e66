"""Pasted text: where its `@` signs are in the typed text, and how a message must be typed."""

from __future__ import annotations

import re
from bisect import bisect_left

FENCE = '"""'  # opens and closes a block of typed lines
_MENTION = re.compile(r"@\S+")


class PastedAtSigns:
    """Knows which `@` of the typed text were pasted; `update` must follow each change.

    A pasted word that comes back whole (from history, by undo or yank) counts as pasted.
    """

    def __init__(self) -> None:
        self._pasted_mentions = set[str]()
        self.reset()

    def reset(self) -> None:
        """Begin with an empty text, but remember words that were pasted earlier."""
        self._text = ""
        self.indices = frozenset[int]()  # of each `@` in the text that was pasted

    def update(self, text: str, *, is_pasted: bool = False) -> int:
        """Take the changed text, whose new part was pasted or typed.

        Returns the number of characters that were inserted and deleted.
        """
        old = self._text
        start = _common_prefix_length(old, text)
        num_after = _common_prefix_length(old[start:][::-1], text[start:][::-1])
        old_end, new_end = len(old) - num_after, len(text) - num_after
        inserted = text[start:new_end]
        indices = {index for index in self.indices if index < start}
        indices |= {index + new_end - old_end for index in self.indices if index >= old_end}
        if is_pasted:
            self._pasted_mentions |= set(_MENTION.findall(inserted))
            indices |= {index for index, char in enumerate(inserted, start) if char == "@"}
        elif len(inserted) > 1:  # more than a key types
            mentions = _MENTION.finditer(inserted)
            indices |= {start + word.start() for word in mentions if self._matches_pasted(word[0])}
        self._text, self.indices = text, frozenset(indices)
        return len(inserted) + old_end - start

    def _matches_pasted(self, word: str) -> bool:
        """Whether a pasted word equals `word`, begins with it, or is its beginning."""
        pasted_words = self._pasted_mentions
        return any(word.startswith(known) or known.startswith(word) for known in pasted_words)


def escape_message(message: str) -> str:
    """How a message must be typed to be sent unchanged: `/x` as `//x`, others in a block."""
    if message.lstrip().startswith("/"):
        return f"/{message.lstrip()}"
    is_block = message.lstrip().startswith(FENCE) or message.endswith("\\")
    return f"{FENCE}\n{message}\n{FENCE}" if is_block else message


def _common_prefix_length(left: str, right: str) -> int:
    lengths = range(1, min(len(left), len(right)) + 1)  # of texts that may be long
    return bisect_left(lengths, True, key=lambda length: left[:length] != right[:length])
