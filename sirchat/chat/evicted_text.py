"""Finds the words of a chat that were evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session
from sirchat.chat.words import MARKS, STOP_WORDS, around, is_mark, said, words_at, words_of

_LATEST = 8
"""The function `latest_words` finds the words of this many tokens."""


@dataclass(frozen=True)
class EvictedText:
    """A turn of which some tokens are not in the cache.

    Attributes:
        index, role: the turn's index, and who wrote it.
        tokens: number of the turn's tokens, without those of the chat template.
        held: how many of these tokens are in the cache.
        words: the words that have an evicted token, the most surprising first; a word that is still
            in the cache at another place is left out.
    """

    index: int
    role: str
    tokens: int
    held: int
    words: tuple[str, ...]


def evicted_turns(session: Session) -> Iterator[EvictedText]:
    """Yield a record of each turn of which some tokens are not in the cache, in order."""
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
    """The words of the user's messages that were evicted with the tokens at these positions.

    The most surprising word comes first. Words that are still in the cache at another place,
    English stop words, and words that most of the user's messages have, are left out.
    """
    rows = [row for row in session.tokens(sorted(positions)) if row.role == "user"]
    if not rows:
        return ()
    held = session.snapshot().rows
    present = {row.position for row in held}
    gone = [row.position for row in rows if row.position not in present]
    # Whole words: the rest of a word may have been evicted before.
    near = session.tokens(around(gone, session.seen))
    whole = [row for row in near if row.role == "user"]
    return words_at(gone, whole, words_of(held) | STOP_WORDS | _common_words(session))


def _common_words(session: Session) -> set[str]:
    """The words, in lower case, that more than half of the user's last messages contain.

    The last `_RECENT` messages are searched. Empty if the user wrote fewer than `_FEW` messages.
    """
    said = [turn.text for turn in session.turns if turn.role == "user"][-_RECENT:]
    if len(said) < _FEW:
        return set()
    counts = Counter(word for text in said for word in set(_spelled_words(text)))
    return {word for word, count in counts.items() if 2 * count > len(said)}


def _spelled_words(text: str) -> Iterator[str]:
    return (word.strip(MARKS).casefold() for word in text.split())


_FEW, _RECENT = 4, 64
"""`_common_words` needs at least `_FEW` user messages, and searches the last `_RECENT` of them."""


def latest_words(
    session: Session, positions: Sequence[int], held: Sequence[TokenRow]
) -> tuple[str, ...]:
    """A few words, of the user or the model, that have tokens at these ascending positions.

    The most surprising word comes first. Words that occur in the held tokens `held` are left out.
    This function takes much less time than `evicted_words`, which returns all words.
    """
    rows = [row for row in said(session.tokens(positions)) if not is_mark(row.text)]
    best = nlargest(_LATEST, rows, key=lambda row: row.surprisal or 0.0)
    at = [row.position for row in best]
    whole = said(session.tokens(around(at, session.seen))) if at else []
    return words_at(at, whole, words_of(held))
