"""Splits tokens into words."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Collection, Iterator, Sequence
from unicodedata import east_asian_width

from sirchat.chat.events import TokenRow

MARKS = string.punctuation + string.whitespace + "…“”‘’«»–—"

STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about after all also am an and any are as at be been but by can could did do does for "
        "from get go had has have he her here hers him his how i if in into is it its just let "
        "like me more my no not now of off on one or our out over please she should so some tell "
        "than that the their them then there these they this those to too up us very was we were "
        "what when where which who why will with would yes you your",
    )
)
"""English words that tell little by themselves, in lower case."""

_LONGEST = 16
"""A word is cut after this many tokens, because some scripts have no blanks between words."""

_REACH = 5
"""To find the whole word of a token, this many tokens on each side of the token are read."""


def is_mark(text: str) -> bool:
    """Whether a text has nothing but punctuation and blanks."""
    return not text.strip(MARKS)


def spelled(word: Sequence[TokenRow]) -> str:
    """The text of a word, given as its tokens, without the punctuation and blanks around it."""
    return "".join(row.text for row in word).strip(MARKS)


def split_words(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """Split tokens, in stream order, into words; yields the tokens of each word.

    A new word begins at a blank, after a stream position that is missing in `rows`, and at the
    start of each turn. A wide (East Asian) character is a word of its own. The blank before a word
    and the punctuation around it belong to the word.
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


def around(positions: Collection[int], seen: int) -> list[int]:
    """These stream positions and up to `_REACH` positions on each side of each, ascending.

    The stream has `seen` tokens.
    """
    near = {at + step for at in positions for step in range(-_REACH, _REACH + 1)}
    return sorted(at for at in near if 0 <= at < seen)


def words_at(
    positions: Collection[int], rows: Sequence[TokenRow], known: Collection[str] = ()
) -> tuple[str, ...]:
    """The words of `rows` that have a token at one of these positions, the most surprising first.

    Each word is named once. Tokens that are only punctuation do not count. The words in `known`, in
    lower case, are left out.
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
    """The words of these tokens, in lower case; tokens of the chat template are left out."""
    return {spelled(word).casefold() for word in split_words(said(rows))}


def said(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The tokens that belong to messages; tokens of the chat template are left out."""
    return [row for row in rows if row.role != "template"]
