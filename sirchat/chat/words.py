"""Words made of tokens, and the words that were evicted."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from sirchat.chat.events import TokenRow

if TYPE_CHECKING:
    from sirchat.chat.session import Session

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


_LATEST = 8
"""Tokens whose words `latest_words` looks for."""


@dataclass(frozen=True)
class EvictedText:
    """A turn of which not all is held.

    `tokens` were said in it, without the template's; `held` of them still are. `words` are those of
    which nothing is held anywhere, the most surprising first.
    """

    index: int
    role: str
    tokens: int
    held: int
    words: tuple[str, ...]


def evicted_turns(session: Session) -> Iterator[EvictedText]:
    """The turns that are not held whole, in order."""
    snapshot = session.snapshot()
    held = {row.position for row in snapshot.rows}
    known = words_of(snapshot.rows)
    start = 0
    for turn in snapshot.turns:
        span, start = range(start, start + turn.tokens), start + turn.tokens
        if turn.held == turn.tokens:
            continue
        rows = said(session.tokens(span))
        gone = [row.position for row in rows if row.position not in held]
        if gone:
            words = words_at(gone, rows, known)
            yield EvictedText(turn.index, turn.role, len(rows), len(rows) - len(gone), words)


def evicted_words(session: Session, positions: Collection[int]) -> tuple[str, ...]:
    """Words of the user's that had tokens at these positions, and are no longer held anywhere.

    The most surprising word is the first.
    """
    rows = [row for row in session.tokens(sorted(positions)) if row.role == "user"]
    if not rows:
        return ()
    held = session.snapshot().rows
    present = {row.position for row in held}
    gone = [row.position for row in rows if row.position not in present]
    # Whole words: the rest of a word may have gone before.
    near = session.tokens(around(gone, session.seen))
    whole = [row for row in near if row.role == "user"]
    return words_at(gone, whole, words_of(held))


def latest_words(
    session: Session, positions: Sequence[int], held: Sequence[TokenRow]
) -> tuple[str, ...]:
    """A few words, whoever said them, that had tokens at these positions, ascending.

    The most surprising word is the first. Words among the rows `held` are left out. It takes much
    less time than `evicted_words`.
    """
    rows = [row for row in said(session.tokens(positions)) if not is_mark(row.text)]
    best = nlargest(_LATEST, rows, key=lambda row: row.surprisal or 0.0)
    at = [row.position for row in best]
    whole = said(session.tokens(around(at, session.seen))) if at else []
    return words_at(at, whole, words_of(held))
