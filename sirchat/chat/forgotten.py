"""What was forgotten, in words: of a turn, and of some tokens."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session

_MARKS = string.punctuation + string.whitespace + "…“”‘’«»–—"


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
    known = _held_words(snapshot.rows)
    start = 0
    for turn in snapshot.turns:
        span, start = range(start, start + turn.tokens), start + turn.tokens
        if turn.held == turn.tokens:
            continue
        rows = [row for row in session.tokens(span) if row.role != "template"]
        gone = [row.position for row in rows if row.position not in held]
        if gone:
            words = _words(rows, gone, known)
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
    near = sorted({at + step for at in gone for step in range(-4, 5)} & set(range(session.seen)))
    whole = [row for row in session.tokens(near) if row.role == "user"]
    return _words(whole, gone, _held_words(held))


def _words(
    rows: Sequence[TokenRow], gone: Collection[int], known: Collection[str]
) -> tuple[str, ...]:
    """Distinct words of `rows` with a token among `gone`, without those known, best first."""
    gone = set(gone)
    found: dict[str, float] = {}
    for word in _split(rows):
        text = "".join(row.text for row in word).strip(_MARKS)
        if text and text.casefold() not in known and any(row.position in gone for row in word):
            least = -math.inf
            found[text] = max(found.get(text, least), *(row.surprisal or least for row in word))
    return tuple(sorted(found, key=lambda text: -found[text]))


def _held_words(rows: Sequence[TokenRow]) -> set[str]:
    return {
        "".join(row.text for row in word).strip(_MARKS).casefold()
        for word in _split([row for row in rows if row.role != "template"])
    }


def _split(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """The words of rows in stream order: a word begins after a blank, a gap or another turn."""
    number, before = 0, None
    numbered: list[tuple[int, TokenRow]] = []
    for row in rows:
        if (
            before is None
            or (row.position, row.turn) != (before.position + 1, before.turn)
            or row.text[:1].isspace()
            or before.text[-1:].isspace()
        ):
            number += 1
        numbered.append((number, row))
        before = row
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        yield [row for _, row in group]
