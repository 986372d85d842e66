"""What a user means by a part of the conversation: some words, a turn, what was said last."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sirchat.errors import UsageError, shown
from sirchat.memory.ledger import Ledger, Role
from sirchat.snapshot import Positions, Texts


def positions_of(
    target: str, ledger: Ledger, texts: Texts, roles: Sequence[str], among: Positions
) -> Positions:
    """The tokens [k], ascending, that `target` means, of those `among` [n] the stream's positions.

    `last` is the last user turn, `turn N` any turn; everything else, and what stands in quotes, is
    a text, wherever it was said, in any case. `roles` has one entry for each turn. What the chat
    template wrote is never meant. Raises UsageError where nothing is.
    """
    said = among[ledger.column("role")[among] != Role.TEMPLATE]
    found = re.fullmatch(r"(?:last|turn +(\d+))", target.strip())
    if found is None:
        positions = _occurrences(_unquoted(target.strip()), ledger, texts, said)
    else:
        users = [n for n, role in enumerate(roles) if role == "user"]
        turn = int(found[1]) if found[1] else max(users, default=-1)
        positions = said[ledger.column("turn")[said] == turn]
    if not len(positions):
        raise UsageError(f"{shown(target)} is nowhere in what can be remembered")
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


def _unquoted(text: str) -> str:
    quoted = len(text) > 2 and text[0] == text[-1] == '"'
    return text[1:-1] if quoted else text
