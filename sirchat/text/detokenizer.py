"""Turns token ids into text, one at a time, and finds the ends of sentences and words."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import panic_as_model_error

# A function from ids [n] and their stream positions [n] to the text of each id: a `TokenTexts`.
Texts = Callable[[Sequence[int], Sequence[int]], list[str]]

# Where a sentence ends: with its line, or at a mark before a blank, but not after `Mr.` or `J.`
SENTENCE_END = re.compile(
    r"""(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\b[A-HJ-Z](?=\. [A-Z]))[.!?…]+"""
    r"""["')\]”’]*(?=\s|$)|[。！？]+|\n+"""
)
QUESTION_MARKS = ("?", "\uff1f")
UNFINISHED = "\ufffd"  # what a tokenizer returns for a token with only some bytes of a character
_UNREADABLE = "the model's tokenizer can't make a text of tokens"
_MAX_CHARACTER_TOKENS = 8  # that are decoded together, because they share parts of characters
# Latin, Armenian, Arabic, Indian and East Asian marks.
_SENTENCE_ENDS = frozenset(
    ".!?\u2026\u203c\u2047\u2048\u2049\u0589\u061f\u06d4\u0964\u0965\u3002\uff01\uff0e\uff1f\uff61"
)
_CLOSING_CATEGORIES = ("Pe", "Pf")  # categories of closing brackets and quotes, which may follow
_WORD_PUNCTUATION = "-'\u2019/@_&"  # which belongs to the word of the letter or digit before it


class TextStream:
    """Turns token ids into text, one at a time; a character is complete after its last token."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        decode = partial(
            tokenizer.decode,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        self._decode: Callable[[list[int]], str] = panic_as_model_error(_UNREADABLE)(decode)
        self._ids: list[int] = []
        self._start = 0  # decoding starts here, so that spaces come out as in the whole text
        self._returned = 0  # number of ids whose text has been returned
        self._prefix_length = 0  # characters of the ids from _start to _returned

    def push(self, token_id: int) -> str:
        """Add an id; return the new text, which is empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])[self._prefix_length :]
        if text.endswith(UNFINISHED) and len(self._ids) - self._returned < _MAX_CHARACTER_TOKENS:
            return ""
        return self._mark_returned(text)

    def flush(self) -> str:
        """Return the text that `push` has held back; an incomplete character becomes U+FFFD."""
        return self._mark_returned(self._decode(self._ids[self._start :])[self._prefix_length :])

    def _mark_returned(self, text: str) -> str:
        """Note that the text of all ids so far has been returned; returns `text`."""
        self._start, self._returned = self._returned, len(self._ids)
        self._prefix_length = len(self._decode(self._ids[self._start :]))
        return text


class TokenTexts:
    """A callable from ids [n] and their stream positions [n] to the text of each token.

    Texts are those that tokens have within a sentence. If several consecutive tokens make one
    character, the first token gets the character; if some of them are missing, each gets U+FFFD.
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
        """Give a character to its first token, at `start`; returns the number of its tokens."""
        # 1, and nothing is changed, if some of its tokens are missing.
        for end in range(start + 2, min(start + _MAX_CHARACTER_TOKENS, len(ids)) + 1):
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

    @panic_as_model_error(_UNREADABLE)
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
    """A mask [n] of the `pieces` [n] that share a character with a match in their joined text."""
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    mask = np.zeros(len(pieces), bool)
    for match in pattern.finditer("".join(pieces)):
        mask[tokens_spelling(ends, match.start(), match.end())] = True
    return mask


def text_with_gaps(pieces: Sequence[str], is_there: NDArray[np.bool_]) -> str:
    """The text of the tokens that are there, on one line, with … for each run of others."""
    runs = groupby(zip(pieces, is_there.tolist(), strict=True), key=lambda piece: piece[1])
    parts = ["".join(text for text, _ in run) if there else " … " for there, run in runs]
    return " ".join("".join(parts).split())


def sentence_bounds(pieces: Sequence[str]) -> list[int]:
    """Indices, from 0 to n, at which sentences begin or end in a text given as n `pieces`."""
    ends = np.cumsum([len(piece) for piece in pieces])
    marks = [match.end() for match in SENTENCE_END.finditer("".join(pieces))]
    return sorted({0, *(np.searchsorted(ends, marks) + 1).tolist(), len(pieces)})


class SentenceEnds:
    """A callable that takes a text's ids in order, and says of each whether it ends a sentence."""

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
    while text and (unicodedata.category(text[-1]) in _CLOSING_CATEGORIES or text[-1] in "\"'"):
        text = text[:-1]
    return bool(text) and text[-1] in _SENTENCE_ENDS


def word_continuation(tokenizer: Any) -> Callable[[int, int], bool]:
    """Make a function that says whether two consecutive token ids belong to the same word.

    A word has no spaces, such as `7:45`, `555-0123` or `it's`; it ends before punctuation.
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
        return _is_part(last) or (last != "" and last in _WORD_PUNCTUATION + ".,:")
    joins = first != "" and (first in _WORD_PUNCTUATION or (first == ":" and last.isdigit()))
    return joins and last.isalnum()


def _is_part(character: str) -> bool:
    return character.isalnum() or character == UNFINISHED
