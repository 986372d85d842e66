"""Durations as text, and when to write the next line of progress into a log file."""

from __future__ import annotations

from collections.abc import Callable

EVERY = 30.0
"""Least number of seconds between two lines in a log file."""


class ProgressPace:
    """Decides when a log file gets a line of progress, and estimates the time left.

    Args:
        done: how much is done at the start.
        total: how much there is to do.
        clock: the time in seconds.
    """

    def __init__(self, done: float, total: float, clock: Callable[[], float]) -> None:
        self._before, self._total, self._clock = done, total, clock
        self._started = self._printed = self._now = clock()

    def is_due(self, done: float) -> bool:
        """Whether a line should be written now: `EVERY` seconds after the last, and at the end."""
        self._now = self._clock()
        is_due = done >= self._total or self._now - self._printed >= EVERY
        if is_due:
            self._printed = self._now
        return is_due

    def left(self, done: float) -> str:
        """`, 3 min left`, as of the last call of `is_due`; empty at the start and at the end."""
        if not self._before < done < self._total:
            return ""
        seconds = (self._now - self._started) / (done - self._before) * (self._total - done)
        return f", {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration as text: `40 s`, `3 min`, `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
