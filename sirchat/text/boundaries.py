"""Finds the ends of sentences and words among token ids."""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sirchat.text.detokenizer import UNFINISHED, TokenTexts

# Unicode's Sentence_Terminal characters of the basic plane, and the ellipsis.
_SENTENCE_ENDS = frozenset(
    ".!?\u2026\u203c\u2047\u2048\u2049\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u07f9\u0837"
    "\u0839\u083d\u083e\u0964\u0965\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5"
    "\u1803\u1809\u1944\u1945\u1aa8\u1aa9\u1aaa\u1aab\u1b5a\u1b5b\u1b5e\u1b5f\u1c3b\u1c3c\u1c7e"
    "\u1c7f\u2cf9\u2cfa\u2cfb\u2e2e\u2e3c\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce"
    "\ua8cf\ua92f\ua9c8\ua9c9\uaa5d\uaa5e\uaa5f\uaaf0\uaaf1\uabeb\ufe52\ufe56\ufe57\uff01\uff0e"
    "\uff1f\uff61"
)
_CLOSERS = ("Pe", "Pf")  # categories of closing brackets and quotes, which may follow
_INSIDE = "-'\u2019/@_&"  # punctuation that belongs to the word of the letter or digit before it


class SentenceEnds:
    """A callable that says of each id of a text, in order, whether it ends a sentence."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bool | None] = {}  # None: the token ends inside a character
        self._recent: deque[int] = deque(maxlen=4)

    def __call__(self, token_id: int) -> bool:
        self._recent.append(token_id)
        if token_id not in self._known:
            text = str(self._tokenizer.decode([token_id]))
            is_partial = text.endswith(UNFINISHED)
            self._known[token_id] = None if is_partial else ends_sentence(text)
        known = self._known[token_id]
        if known is not None:
            return known
        return ends_sentence(str(self._tokenizer.decode(list(self._recent))))


def ends_sentence(text: str) -> bool:
    """Whether a text ends with a mark such as `.`, `?` or `。`; quotes and brackets may follow."""
    text = text.rstrip()
    while text and (unicodedata.category(text[-1]) in _CLOSERS or text[-1] in "\"'"):
        text = text[:-1]
    return bool(text) and text[-1] in _SENTENCE_ENDS


def word_continuation(tokenizer: Any) -> Callable[[int, int], bool]:
    """A function that says whether two consecutive token ids belong to the same word.

    A word has no spaces, as `7:45`, `555-0123` or `it's`; a mark after it is not part of it.
    """
    texts = TokenTexts(tokenizer)

    @lru_cache(maxsize=1 << 16)  # pairs of ids
    def continues(previous: int, token_id: int) -> bool:
        return continues_word(texts([previous], [0])[0], texts([token_id], [0])[0])

    return continues


def continues_word(previous: str, text: str) -> bool:
    """Whether the word at the end of the token `previous` goes on in the token `text`."""
    last, first = previous[-1:], text[:1]
    if _is_part(first):
        return _is_part(last) or (last != "" and last in _INSIDE + ".,:")
    joins = first != "" and (first in _INSIDE or (first == ":" and last.isdigit()))
    return joins and last.isalnum()


def _is_part(character: str) -> bool:
    return character.isalnum() or character == UNFINISHED
