"""Counts the held tokens of a conversation from its events alone."""

from __future__ import annotations

from typing import Any

from sirchat.chat.events import Event, Evicted, Restored, TurnDone


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
