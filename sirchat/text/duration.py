"""Times in words, and when a log file gets its next line of progress."""

from __future__ import annotations

from collections.abc import Callable

EVERY = 30.0
"""Least number of seconds between two lines in a log file."""


class ProgressPace:
    """Times the lines of progress in a log file, and estimates the time that is left.

    Args:
        done: how much is done at the start.
        total: how much there is to do.
        clock: the time in seconds.
    """

    def __init__(self, done: float, total: float, clock: Callable[[], float]) -> None:
        self._before, self._total, self._clock = done, total, clock
        self._started = self._printed = self._now = clock()

    def is_due(self, done: float) -> bool:
        """Whether a line is due with so much done: after `EVERY` seconds, and at the end."""
        self._now = self._clock()
        is_due = done >= self._total or self._now - self._printed >= EVERY
        if is_due:
            self._printed = self._now
        return is_due

    def left(self, done: float) -> str:
        """`, 3 min left` as of the last line; empty at the start and at the end."""
        if not self._before < done < self._total:
            return ""
        seconds = (self._now - self._started) / (done - self._before) * (self._total - done)
        return f", {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A time in words: `40 s`, `3 min`, `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
