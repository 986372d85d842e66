"""What a user means by a part of the conversation: some words, a turn, what was said last."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sirchat.chat.snapshot import Positions, Texts
from sirchat.errors import UsageError, format_value
from sirchat.memory.ledger import Flag, Ledger, Role


def positions_of(
    target: str, ledger: Ledger, texts: Texts, roles: Sequence[str], among: Positions
) -> Positions:
    """The tokens [k], ascending, that `target` means, of those `among` [n] the stream's positions.

    `last` is the last user turn, `turn N` any turn; everything else, and what stands in quotes, is
    a text, wherever it was said, in any case. `roles` has one entry for each turn. What the chat
    template wrote is never meant. Raises UsageError where nothing is.
    """
    is_erased = (ledger.column("flags")[among] & Flag.ERASED).astype(bool)
    said = among[(ledger.column("role")[among] != Role.TEMPLATE) & ~is_erased]
    turn = turn_meant(target, roles)
    if turn is None:
        positions = _occurrences(unquoted(target), ledger, texts, said)
    else:
        positions = said[ledger.column("turn")[said] == turn]
    if not len(positions):
        raise UsageError(f"{format_value(target)} is nowhere in what can be remembered")
    return positions


def _occurrences(text: str, ledger: Ledger, texts: Texts, said: Positions) -> Positions:
    """The tokens that `text` touches wherever it stands in tokens that follow one another."""
    if not text:
        raise UsageError("say what", hint="some words, last, or turn N")
    at = said.tolist()
    pieces = texts(ledger.column("token_id")[said].tolist(), at)
    chosen = np.zeros(len(at), bool)
    breaks = np.flatnonzero(np.diff(said) > 1) + 1
    for run in np.split(np.arange(len(at)), breaks):
        parts = [pieces[i] for i in run.tolist()]
        ends = np.cumsum([len(part) for part in parts])
        for match in re.finditer(re.escape(text), "".join(parts), re.IGNORECASE):
            first = np.searchsorted(ends, match.start(), side="right")
            last = np.searchsorted(ends, match.end() - 1, side="right")
            chosen[run[first : last + 1]] = True
    return said[chosen]


def without(target: str, text: str) -> str:
    """`text` with all that `target`, a text, names taken out."""
    return re.sub(re.escape(unquoted(target)), "", text, flags=re.IGNORECASE)


def turn_meant(target: str, roles: Sequence[str]) -> int | None:
    """The turn that `target` means; None where it is a text; -1 for the last where none is."""
    found = re.fullmatch(r"(?:last|turn +(\d+))", target.strip())
    if found is None:
        return None
    users = [n for n, role in enumerate(roles) if role == "user"]
    return int(found[1]) if found[1] else max(users, default=-1)


def unquoted(target: str) -> str:
    """A text as it is meant, without the quotes around it."""
    text = target.strip()
    quoted = len(text) > 2 and text[0] == text[-1] == '"'
    return text[1:-1] if quoted else text
