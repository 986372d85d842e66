"""Rows for a ledger of which only some columns matter."""

from __future__ import annotations

from collections.abc import Sequence

from sirchat.memory.ledger import Ledger, Role


def append_rows(
    ledger: Ledger,
    surprisal: list[float],
    number: int = 0,
    flags: list[int] | None = None,
    ids: list[int] | None = None,
    roles: Sequence[int] | None = None,
) -> None:
    zeros, said = [0] * len(surprisal), [Role.SYSTEM] * len(surprisal)
    ledger.append(
        ids or zeros,
        surprisal,
        turn=number,
        round=number,
        roles=list(roles or said),
        flags=flags or zeros,
    )
