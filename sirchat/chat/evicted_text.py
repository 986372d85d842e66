"""Finds the words of a chat that were evicted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session
from sirchat.chat.token_rows import (
    is_punctuation,
    near_positions,
    without_template,
    words_at,
    words_in,
)
from sirchat.recall.word_index import STOP_WORDS

_MAX_TOKENS = 8  # tokens whose words `surprising_words` finds


@dataclass(frozen=True)
class EvictedTurn:
    """A turn of which some tokens are not held."""

    index: int
    role: str
    tokens: int  # of the message, not of the chat template
    held: int  # of these tokens
    # With an evicted token, most surprising first; if a token is held, those not held elsewhere.
    words: tuple[str, ...]


def evicted_turns(session: Session) -> Iterator[EvictedTurn]:
    snapshot = session.snapshot()
    held = {row.position for row in snapshot.rows}
    held_words = words_in(snapshot.rows)
    parts, start = [(0, "system", [*session.tokens(range(*snapshot.own_text))])], 0
    for turn in snapshot.turns:
        span, start = range(start, start + turn.tokens), start + turn.tokens
        if turn.held < turn.tokens:
            parts.append((turn.index, turn.role, without_template(session.tokens(span))))
    for index, role, rows in parts:
        evicted = [row.position for row in rows if row.position not in held]
        if evicted:
            words = words_at(evicted, rows, held_words if len(evicted) < len(rows) else ())
            yield EvictedTurn(index, role, len(rows), len(rows) - len(evicted), words)


def evicted_words(session: Session, positions: Collection[int]) -> tuple[str, ...]:
    """The user's words with evicted tokens at these positions, most surprising first.

    Left out are words that are held at another place, and English stop words.
    """
    roles = session.state.roles  # a summary is not what the user said
    rows = [row for row in session.tokens(sorted(positions)) if row.role == roles[row.turn]]
    rows = [row for row in rows if row.role == "user"]
    if not rows:
        return ()
    held = session.snapshot().rows
    held_positions = {row.position for row in held}
    evicted = [row.position for row in rows if row.position not in held_positions]
    # Whole words: the rest of a word may have been evicted before.
    near = session.tokens(near_positions(evicted, session.seen))
    near_user = [row for row in near if row.role == "user"]
    return words_at(evicted, near_user, words_in(held) | STOP_WORDS)


def surprising_words(
    session: Session, positions: Sequence[int], held: Sequence[TokenRow]
) -> tuple[str, ...]:
    """A few words with tokens at these positions, ascending, most surprising first.

    Words that occur in the held tokens `held` are left out. This search is fast.
    """
    tokens = without_template(session.tokens(positions))
    rows = [row for row in tokens if not is_punctuation(row.text)]
    best = nlargest(_MAX_TOKENS, rows, key=lambda row: row.surprisal or 0.0)
    positions = [row.position for row in best]
    near = without_template(session.tokens(near_positions(positions, session.seen)))
    return words_at(positions, near, words_in(held))
