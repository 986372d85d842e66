"""Rows for a ledger of which only some columns matter."""

from __future__ import annotations

from sirchat.memory.ledger import Ledger


def append_rows(
    ledger: Ledger,
    surprisal: list[float],
    number: int = 0,
    flags: list[int] | None = None,
    ids: list[int] | None = None,
) -> None:
    zeros = [0] * len(surprisal)
    ledger.append(
        ids or zeros, surprisal, turn=number, round=number, roles=zeros, flags=flags or zeros
    )
