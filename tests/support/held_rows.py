"""The rows that a chat holds: written by hand, compared, and counted from its events alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.events import Event, Evicted, Restored, TurnDone
from sirchat.chat.session import Session
from sirchat.engine.engine import Engine
from sirchat.memory.ledger import Ledger, Placement, Role, State


def contents(engine: Engine) -> list[Tensor]:
    """Positions of the held rows, then keys and values of each layer."""
    layers = range(len(engine.cache.row_layers))
    views = [
        view(n) for n in layers for view in (engine.cache.layer_keys, engine.cache.layer_values)
    ]
    return [torch.from_numpy(engine.ledger.held_positions.copy()), *(one.clone() for one in views)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def state(chat: Session) -> tuple[Any, ...]:
    """Everything that what comes next depends on, and all counts but times."""
    rows = [(row.position, row.id, row.score, row.flags) for row in chat.snapshot().rows]
    end = chat.closing_event()
    counts = (end.turns, end.seen, end.resident, end.tokens_out)
    logits = chat.engine.save().logits
    return rows, counts, None if logits is None else logits.tolist()


class Count:
    """Counts held tokens, turns and surprisal from events alone."""

    def __init__(self) -> None:
        self.tokens: dict[int, Any] = {}  # position -> row, of every token that was reported
        self.gone: set[int] = set()
        self.ends: list[int] = []
        self.roles: list[str] = []

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Restored | Evicted | TurnDone):
                assert event.tokens is not None
                self.tokens |= {row.position: row for row in event.tokens}
            if isinstance(event, Evicted):
                self.gone |= set(event.positions)
            if isinstance(event, Restored):
                assert set(event.positions) <= self.gone
                self.gone -= set(event.positions)
            if isinstance(event, TurnDone):
                self.ends.append(event.seen)
                self.roles.append(event.role)

    @property
    def held(self) -> list[int]:
        return [position for position in range(self.ends[-1]) if position not in self.gone]


def keep_rows(ledger: Ledger, rows: Sequence[int] | Tensor) -> list[int]:
    """Evict all held rows but those with these numbers; returns the positions of the evicted."""
    held = ledger.held_positions.copy()
    kept = held[np.asarray(rows, np.int64)]
    gone = np.setdiff1d(held, kept)
    ledger.hold(Placement(kept), gone, held[:0], State.NOT_STORED)
    return [int(position) for position in gone]


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
