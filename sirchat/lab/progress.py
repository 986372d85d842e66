"""Reports the progress of long work on stderr: a bar in a terminal, else lines of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0  # the fewest seconds between two progress lines in a log file

T = TypeVar("T")


class ProgressPace:
    """Decides when a log file gets a line of progress, and estimates the time left."""

    def __init__(self, done: float, total: float, clock: Callable[[], float]) -> None:
        self._before, self._total, self._clock = done, total, clock
        self._started = self._printed = self._now = clock()

    def is_due(self, done: float) -> bool:
        """Whether to write a line now: at the end, or `EVERY` seconds after the last."""
        self._now = self._clock()
        is_due = done >= self._total or self._now - self._printed >= EVERY
        if is_due:
            self._printed = self._now
        return is_due

    def left(self, done: float) -> str:
        """The estimated time left, such as `, 3 min left`; '' at the start and at the end."""
        if not self._before < done < self._total:
            return ""
        seconds = (self._now - self._started) / (done - self._before) * (self._total - done)
        return f", {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration as text such as `40 s`, `3 min` or `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def with_progress(
    done: Iterator[T],
    total: int,
    known: int,
    name: str,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the units of a study as they finish, and report the progress.

    `known` is the number of units that an earlier run has finished.
    """
    console = console or Console(stderr=True, highlight=False)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            yield from bar.track(done, total, completed=known, description=name)
        return
    pace = ProgressPace(known, total, clock)
    console.print(f"{name}: {known:,} of {total:,}", markup=False, soft_wrap=True)
    for finished, unit in enumerate(done, known + 1):
        if pace.is_due(finished):
            line = f"{name}: {finished:,} of {total:,}{pace.left(finished)}"
            console.print(line, markup=False, soft_wrap=True)
        yield unit
