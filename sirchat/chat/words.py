"""Splits tokens into words."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Collection, Iterator, Sequence
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.events import TokenRow
from sirchat.recall.word_index import FIRST_CJK

PUNCTUATION = string.punctuation + string.whitespace + "…“”‘’«»–—。、，！？：；「」（）¿¡"

_OPENING = {")": "(", "]": "[", "}": "{"}  # by the closing one
_SPELLED = re.compile(rf"[^\s{FIRST_CJK}-\U0010ffff]+|[{FIRST_CJK}-\U0010ffff]+")
_MAX_WORD_TOKENS = 16  # then it is cut, as some scripts have no blanks between words
_NEIGHBOURS = 5  # tokens that are read on each side of a token, to find its whole word


def is_punctuation(text: str) -> bool:
    """Whether a text has nothing but punctuation and blanks."""
    return not text.strip(PUNCTUATION)


def without_template(rows: Sequence[TokenRow]) -> list[TokenRow]:
    return [row for row in rows if row.role != "template"]


def word_text(word: Sequence[TokenRow]) -> str:
    """The text of a word's tokens, without the punctuation and blanks around it.

    A bracket that closes one within the word stays, as in `len(values)`.
    """
    return _without_punctuation("".join(row.text for row in word))


def _without_punctuation(whole: str) -> str:
    text, after = whole.strip(PUNCTUATION), whole.rstrip()[len(whole.rstrip(PUNCTUATION)) :]
    while (opening := _OPENING.get(after[:1])) and text.count(opening) > text.count(after[0]):
        text, after = text + after[0], after[1:]
    return text


def split_words(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """Split tokens, in stream order, into words; yields the tokens of each word.

    A word begins at a blank, after a missing stream position, and with a turn. A wide (East Asian)
    character is a word. The blank before a word and the punctuation around it belong to the word.
    """
    word: list[TokenRow] = []
    for row in rows:
        if word and (len(word) == _MAX_WORD_TOKENS or _is_apart(word[-1], row)):
            yield word
            word = []
        word.append(row)
    if word:
        yield word


def words_in(rows: Sequence[TokenRow]) -> set[str]:
    """The words of these tokens, in lower case, without those of the chat template."""
    return {word_text(word).casefold() for word in split_words(without_template(rows))}


def words_at(
    positions: Collection[int], rows: Sequence[TokenRow], known: Collection[str] = ()
) -> tuple[str, ...]:
    """The words of `rows` with a token at one of these positions, most surprising first.

    Tokens of punctuation alone do not count. Words in `known`, in lower case, are left out.
    """
    asked = set(positions)
    surprisal: dict[str, float] = {}  # of each word's most surprising token, in nats
    for word in split_words(rows):
        text = word_text(word)
        is_asked = any(row.position in asked and not is_punctuation(row.text) for row in word)
        if is_asked and text.casefold() not in known:
            nats = max(-math.inf if row.surprisal is None else row.surprisal for row in word)
            surprisal[text] = max(surprisal.get(text, -math.inf), nats)
    return tuple(sorted(surprisal, key=lambda text: -surprisal[text]))


def words_missing(pieces: Sequence[str], is_there: NDArray[np.bool_]) -> tuple[str, ...]:
    """The words of a text with a token that is not there, in order; punctuation is never missed.

    `is_there` is a mask of its tokens `pieces`. Of a run of CJK characters, those that are missing.
    """
    ends = np.cumsum([0, *map(len, pieces)])
    text, is_missing = "".join(pieces), np.zeros(ends[-1] + 1, bool)
    for index in np.flatnonzero(~is_there):  # a token without text is a part of the next character
        is_missing[ends[index] : max(ends[index] + 1, ends[index + 1])] = True
    is_missing[[index for index, char in enumerate(text) if char in PUNCTUATION]] = False
    found = list[str]()
    for match in _SPELLED.finditer(text):
        start, end = match.span()
        if text[start] >= FIRST_CJK:
            marked = "".join(text[i] if is_missing[i] else " " for i in range(start, end))
            found += marked.split()
        elif is_missing[start:end].any():
            found.append(_without_punctuation(match[0]))
    return tuple(found)


def near_positions(positions: Collection[int], seen: int) -> list[int]:
    """These positions and up to 5 on each side, ascending, in a stream of `seen` tokens."""
    steps = range(-_NEIGHBOURS, _NEIGHBOURS + 1)
    near = {position + step for position in positions for step in steps}
    return sorted(position for position in near if 0 <= position < seen)


def _is_apart(before: TokenRow, row: TokenRow) -> bool:
    """Whether a new word begins at the token `row`, which follows the token `before`."""
    if row.position != before.position + 1 or row.turn != before.turn:
        return True
    left, right = before.text, row.text
    if left.isspace():  # a blank belongs to the word after it
        return False
    if right[:1].isspace() or left[-1:].isspace():
        return True
    return _is_wide(left[-1:]) or _is_wide(right[:1])


def _is_wide(char: str) -> bool:
    return not char.isascii() and east_asian_width(char) in "WF"
