"""How often the live region is redrawn."""

from __future__ import annotations

import time

FRAME_SECONDS = 1 / 8
TEXT_SECONDS = 1 / 30
"""Least time between two frames where no panel is drawn, only text."""
BYTES_PER_SECOND = 12_000
"""Most bytes of frames per second, besides the reply's own text."""
TIME_SHARE = 1 / 50
"""Largest share of the time spent drawing."""


class Pace:
    """When the next frame is due: fewer come if frames are large or slow.

    Args:
        seconds: least time between two frames.
    """

    def __init__(self, seconds: float = FRAME_SECONDS) -> None:
        self._seconds = seconds
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether a frame may be drawn now."""
        return time.monotonic() >= self._due

    def drew(self, seconds: float, size: int) -> None:
        """Record that a frame took so many seconds and bytes."""
        wait = max(self._seconds, size / BYTES_PER_SECOND, seconds / TIME_SHARE)
        self._due = time.monotonic() + wait
