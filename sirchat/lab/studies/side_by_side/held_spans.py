"""The spans of the stream in which each token was held, from the events of a session."""

from __future__ import annotations

from collections.abc import Iterable

from sirchat.chat.events import Event, Evicted, Recalled, Restored

Span = tuple[int, int | None]
"""Held while the tokens from one position to before the other were read; None: to the end."""


class HeldSpans:
    """The spans of every token, kept up to date by events; time is counted in tokens read."""

    def __init__(self) -> None:
        self._ended: dict[int, list[tuple[int, int]]] = {}
        self._since: dict[int, int | None] = {}  # of tokens ever evicted; None while evicted

    def note(self, event: Event) -> None:
        """Record the tokens that an event evicts or restores."""
        if isinstance(event, Evicted):
            self._evict(event.positions, event.seen)
        elif isinstance(event, Restored):
            self._restore(event.positions, event.seen)
        elif isinstance(event, Recalled):
            self._evict(event.released, event.seen)
            self._restore(event.positions, event.seen)

    def spans(self, seen: int) -> list[tuple[Span, ...]]:
        """For each of the first `seen` tokens, its spans in order; at least one."""
        return [self._of(position) for position in range(seen)]

    def _of(self, position: int) -> tuple[Span, ...]:
        since = self._since.get(position, position)
        now: tuple[Span, ...] = () if since is None else ((since, None),)
        return (*self._ended.get(position, ()), *now)

    def _evict(self, positions: Iterable[int], seen: int) -> None:
        for position in positions:
            since = self._since.get(position, position)
            if since is not None:
                self._ended.setdefault(position, []).append((since, seen))
            self._since[position] = None

    def _restore(self, positions: Iterable[int], seen: int) -> None:
        for position in positions:
            if self._since.get(position, position) is None:
                self._since[position] = seen
