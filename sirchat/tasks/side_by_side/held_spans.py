"""When each token was held: followed through the events of a session."""

from __future__ import annotations

from collections.abc import Iterable

from sirchat.chat.events import Event, Evicted, Recalled, Restored

Span = tuple[int, int | None]
"""Held while the tokens at these positions were read, the last one excluded; None: to the end."""


class HeldSpans:
    """The spans of every token, from what a session reports; time is counted in tokens read."""

    def __init__(self) -> None:
        self._ended: dict[int, list[tuple[int, int]]] = {}
        self._since: dict[int, int | None] = {}  # of what has ever left; None while it is away

    def note(self, event: Event) -> None:
        """Take note of what left and what came back."""
        if isinstance(event, Evicted):
            self._left(event.positions, event.seen)
        elif isinstance(event, Restored):
            self._came(event.positions, event.seen)
        elif isinstance(event, Recalled):
            self._left(event.released, event.seen)
            self._came(event.positions, event.seen)

    def spans(self, seen: int) -> list[tuple[Span, ...]]:
        """For each of the first `seen` tokens, when it was held; one at least, in order."""
        return [self._of(position) for position in range(seen)]

    def _of(self, position: int) -> tuple[Span, ...]:
        since = self._since.get(position, position)
        now: tuple[Span, ...] = () if since is None else ((since, None),)
        return (*self._ended.get(position, ()), *now)

    def _left(self, positions: Iterable[int], seen: int) -> None:
        for position in positions:
            since = self._since.get(position, position)
            if since is not None:
                self._ended.setdefault(position, []).append((since, seen))
            self._since[position] = None

    def _came(self, positions: Iterable[int], seen: int) -> None:
        for position in positions:
            if self._since.get(position, position) is None:
                self._since[position] = seen
