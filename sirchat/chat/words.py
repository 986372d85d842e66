"""Words made of tokens: where they begin and end, and which ones certain tokens belong to."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Iterator, Sequence
from unicodedata import east_asian_width

from sirchat.chat.events import TokenRow

_MARKS = string.punctuation + string.whitespace + "…“”‘’«»–—"

_LONGEST = 16
"""Most tokens of a word; text of some scripts has no blanks for long."""

_REACH = 5
"""Tokens on either side among which the rest of a token's word is looked for."""


def is_mark(text: str) -> bool:
    """Whether a text is nothing but punctuation and blanks."""
    return not text.strip(_MARKS)


def spelled(word: Sequence[TokenRow]) -> str:
    """A word's text without the punctuation and the blanks around it."""
    return "".join(row.text for row in word).strip(_MARKS)


def split_words(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """The words of rows in stream order, with the blanks before and the punctuation around each.

    A word begins after a blank, a gap or another turn; a wide character is a word of its own.
    """
    word: list[TokenRow] = []
    for row in rows:
        if word and (len(word) == _LONGEST or _is_apart(word[-1], row)):
            yield word
            word = []
        word.append(row)
    if word:
        yield word


def _is_apart(before: TokenRow, row: TokenRow) -> bool:
    """Whether a word ends between two neighbours."""
    if row.position != before.position + 1 or row.turn != before.turn:
        return True
    left, right = before.text, row.text
    if left.isspace():  # belongs to the word behind it
        return False
    if right[:1].isspace() or left[-1:].isspace():
        return True
    return _is_wide(left[-1:]) or _is_wide(right[:1])


def _is_wide(char: str) -> bool:
    return not char.isascii() and east_asian_width(char) in "WF"


def around(positions: Collection[int], seen: int) -> list[int]:
    """These positions and their neighbours in a stream of `seen` tokens, ascending."""
    near = {at + step for at in positions for step in range(-_REACH, _REACH + 1)}
    return sorted(at for at in near if 0 <= at < seen)


def words_at(
    positions: Collection[int], rows: Sequence[TokenRow], known: Collection[str] = ()
) -> tuple[str, ...]:
    """Distinct words of `rows` with a token at these positions, the most surprising first.

    Words of punctuation only, and those `known` (in lower case), are left out.
    """
    wanted = set(positions)
    found: dict[str, float] = {}
    for word in split_words(rows):
        text = spelled(word)
        gone = any(row.position in wanted and not is_mark(row.text) for row in word)
        if gone and text.casefold() not in known:
            least = -math.inf
            found[text] = max(found.get(text, least), *(row.surprisal or least for row in word))
    return tuple(sorted(found, key=lambda text: -found[text]))


def words_of(rows: Sequence[TokenRow]) -> set[str]:
    """All that was said in the rows, as words in lower case."""
    return {spelled(word).casefold() for word in split_words(said(rows))}


def said(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The rows without the template's."""
    return [row for row in rows if row.role != "template"]
