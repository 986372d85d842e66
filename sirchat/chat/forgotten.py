"""What was forgotten, in words: of a turn, and of some tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session
from sirchat.chat.words import around, is_mark, said, words_at, words_of

_LATEST = 8
"""Tokens whose words `latest_words` looks for."""


@dataclass(frozen=True)
class ForgottenTurn:
    """A turn of which not all is held.

    `tokens` were said in it, without the template's; `held` of them still are. `words` are those of
    which nothing is held anywhere, the most surprising first.
    """

    index: int
    role: str
    tokens: int
    held: int
    words: tuple[str, ...]


def forgotten_turns(session: Session) -> Iterator[ForgottenTurn]:
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
            yield ForgottenTurn(turn.index, turn.role, len(rows), len(rows) - len(gone), words)


def forgotten_words(session: Session, positions: Collection[int]) -> tuple[str, ...]:
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
    less time than `forgotten_words`.
    """
    rows = [row for row in said(session.tokens(positions)) if not is_mark(row.text)]
    best = nlargest(_LATEST, rows, key=lambda row: row.surprisal or 0.0)
    at = [row.position for row in best]
    whole = said(session.tokens(around(at, session.seen))) if at else []
    return words_at(at, whole, words_of(held))
