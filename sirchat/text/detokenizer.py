"""Turns token ids into text, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A function from ids [n] and their stream positions [n] to the text of each id: a `TokenTexts`.
Texts = Callable[[Sequence[int], Sequence[int]], list[str]]

UNFINISHED = "\ufffd"  # what a tokenizer returns for a token with only some bytes of a character
_LONGEST = 8  # tokens that are decoded together, because they share parts of characters


class TextStream:
    """Turns token ids into text, one at a time; a character comes with its last token."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._decode: Callable[[list[int]], str] = partial(
            tokenizer.decode,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        self._ids: list[int] = []
        self._start = 0  # decoding starts here, so that spaces come out as in the whole text
        self._returned = 0  # number of ids whose text has been returned
        self._prefix_length = 0  # characters of the ids from _start to _returned

    def push(self, token_id: int) -> str:
        """Add an id; return the new text, which is empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])[self._prefix_length :]
        if text.endswith(UNFINISHED) and len(self._ids) - self._returned < _LONGEST:
            return ""
        return self._returning(text)

    def flush(self) -> str:
        """Return the text that `push` has held back; an incomplete character becomes U+FFFD."""
        return self._returning(self._decode(self._ids[self._start :])[self._prefix_length :])

    def _returning(self, text: str) -> str:
        self._start, self._returned = self._returned, len(self._ids)
        self._prefix_length = len(self._decode(self._ids[self._start :]))
        return text


class TokenTexts:
    """A callable from ids [n] and their stream positions [n] to the text of each token.

    It is what the token spells within a sentence. Of consecutive tokens that make one character,
    the first has it; if some of them are missing, each has U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # With some tokenizers a word decoded alone loses its space, but not after another token.
        self._lead: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def __call__(self, ids: Sequence[int], positions: Sequence[int]) -> list[str]:
        texts = [self._text(token_id) for token_id in ids]
        at = 0
        while at < len(ids):
            at += self._join(ids, positions, texts, at) if UNFINISHED in texts[at] else 1
        return texts

    def _join(
        self, ids: Sequence[int], positions: Sequence[int], texts: list[str], start: int
    ) -> int:
        """Give a character that several tokens make to the first of them, at `start`.

        Returns the number of tokens; 1 if some are missing, and nothing is changed.
        """
        for end in range(start + 2, min(start + _LONGEST, len(ids)) + 1):
            if positions[end - 1] != positions[start] + end - 1 - start:
                break
            character = self._decode(ids[start:end])
            if UNFINISHED not in character:
                texts[start:end] = [character, *[""] * (end - 1 - start)]
                return end - start
        return 1

    def _text(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._decode([token_id])
        return self._known[token_id]

    def _decode(self, ids: Sequence[int]) -> str:
        def decode(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

        lead, text = decode(self._lead), decode([*self._lead, *ids])
        return text[len(lead) :] if lead and text.startswith(lead) else decode(ids)


def tokens_spelling(ends: NDArray[np.int64], start: int, end: int) -> slice:
    """The tokens with characters `start` to `end` - 1; the text of token i stops at `ends[i]`."""
    first, last = np.searchsorted(ends, [start, end - 1], side="right").tolist()
    return slice(first, last + 1)


def tokens_matching(pattern: re.Pattern[str], pieces: Sequence[str]) -> NDArray[np.bool_]:
    """A mask [n] of the `pieces` [n] that have a character of a match in their joined text."""
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    mask = np.zeros(len(pieces), bool)
    for match in pattern.finditer("".join(pieces)):
        mask[tokens_spelling(ends, match.start(), match.end())] = True
    return mask
