"""How often the region beneath an answer is drawn again."""

from __future__ import annotations

import time

FRAME_SECONDS = 1 / 8
BYTES_PER_SECOND = 12_000
"""What the frames may write; the answer's own text comes on top."""
TIME_SHARE = 1 / 50
"""Of the time, drawing takes no more than this."""


class Pace:
    """Says when the next frame is due: 8 a second, fewer when they are long or slow."""

    def __init__(self) -> None:
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether a frame may be drawn now."""
        return time.monotonic() >= self._due

    def drew(self, seconds: float, size: int) -> None:
        """A frame took so many seconds and bytes."""
        wait = max(FRAME_SECONDS, size / BYTES_PER_SECOND, seconds / TIME_SHARE)
        self._due = time.monotonic() + wait
