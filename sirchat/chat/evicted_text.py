"""Finds the words of a chat that were evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session
from sirchat.chat.words import (
    PUNCTUATION,
    is_punctuation,
    near_positions,
    without_template,
    words_at,
    words_in,
)
from sirchat.recall.word_index import STOP_WORDS

_LATEST = 8  # tokens whose words `surprising_words` finds
_FEWEST, _RECENT = 4, 64  # user messages that `_common_words` needs, and the most that it searches


@dataclass(frozen=True)
class EvictedTurn:
    """A turn of which some tokens are not in the cache."""

    index: int
    role: str
    tokens: int  # of the message, not of the chat template
    held: int  # of these tokens
    # With an evicted token, most surprising first; if a token is held, those not held elsewhere.
    words: tuple[str, ...]


def evicted_turns(session: Session) -> Iterator[EvictedTurn]:
    """Yield a record of each turn of which some tokens are not in the cache, in order."""
    snapshot = session.snapshot()
    held = {row.position for row in snapshot.rows}
    known = words_in(snapshot.rows)
    parts, start = [(0, "system", [*session.tokens(range(*snapshot.own_text))])], 0
    for turn in snapshot.turns:
        span, start = range(start, start + turn.tokens), start + turn.tokens
        if turn.held < turn.tokens:
            parts.append((turn.index, turn.role, without_template(session.tokens(span))))
    for index, role, rows in parts:
        gone = [row.position for row in rows if row.position not in held]
        if gone:
            words = words_at(gone, rows, known if len(gone) < len(rows) else ())
            yield EvictedTurn(index, role, len(rows), len(rows) - len(gone), words)


def evicted_words(session: Session, positions: Collection[int]) -> tuple[str, ...]:
    """The user's words that were evicted with the tokens at these positions, surprising first.

    Words that are held at another place, English stop words, and words that most of the user's
    messages have, are left out.
    """
    roles = session.state.roles  # a summary is not what the user said
    rows = [row for row in session.tokens(sorted(positions)) if row.role == roles[row.turn]]
    rows = [row for row in rows if row.role == "user"]
    if not rows:
        return ()
    held = session.snapshot().rows
    present = {row.position for row in held}
    gone = [row.position for row in rows if row.position not in present]
    # Whole words: the rest of a word may have been evicted before.
    near = [row for row in session.tokens(near_positions(gone, session.seen)) if row.role == "user"]
    return words_at(gone, near, words_in(held) | STOP_WORDS | _common_words(session))


def surprising_words(
    session: Session, positions: Sequence[int], held: Sequence[TokenRow]
) -> tuple[str, ...]:
    """A few words with tokens at these ascending positions, surprising first, fast to find.

    Words that occur in the held tokens `held` are left out.
    """
    rows = [
        row for row in without_template(session.tokens(positions)) if not is_punctuation(row.text)
    ]
    best = nlargest(_LATEST, rows, key=lambda row: row.surprisal or 0.0)
    at = [row.position for row in best]
    near = without_template(session.tokens(near_positions(at, session.seen))) if at else []
    return words_at(at, near, words_in(held))


def _common_words(session: Session) -> set[str]:
    """The words, in lower case, that more than half of the user's last messages have."""
    texts = [turn.text for turn in session.turns if turn.role == "user"][-_RECENT:]
    if len(texts) < _FEWEST:
        return set()
    counts = Counter(
        word
        for text in texts
        for word in {spelling.strip(PUNCTUATION).casefold() for spelling in text.split()}
    )
    return {word for word, count in counts.items() if 2 * count > len(texts)}
