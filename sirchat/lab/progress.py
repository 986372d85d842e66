"""Reports the progress of long work on stderr: as a bar in a terminal, as lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0
"""The smallest number of seconds between two progress lines in a log file."""


class ProgressPace:
    """Decides when a log file gets a line of progress, and estimates the time left.

    Args:
        done: the amount of work that is done at the start, in any unit.
        total: the whole amount of work, in the same unit.
        clock: returns the time in seconds.
    """

    def __init__(self, done: float, total: float, clock: Callable[[], float]) -> None:
        self._before, self._total, self._clock = done, total, clock
        self._started = self._printed = self._now = clock()

    def is_due(self, done: float) -> bool:
        """Whether to write a line now, when the amount `done` is done.

        True at the end of the work, and if the last line is at least `EVERY` seconds old.
        """
        self._now = self._clock()
        is_due = done >= self._total or self._now - self._printed >= EVERY
        if is_due:
            self._printed = self._now
        return is_due

    def left(self, done: float) -> str:
        """The estimated time left as text, such as `, 3 min left`; empty at the start and end.

        The estimate uses the time of the last call of `is_due`.
        """
        if not self._before < done < self._total:
            return ""
        seconds = (self._now - self._started) / (done - self._before) * (self._total - done)
        return f", {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration as text, such as `40 s`, `3 min` or `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


T = TypeVar("T")


def with_progress(
    done: Iterator[T],
    total: int,
    known: int,
    name: str,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the finished units (independent runs) of a study, and report progress.

    Args:
        done: yields the units as they finish.
        total: number of units.
        known: number of units that were finished before this run.
        name: name of the study.
        console: where to report; by default stderr.
        clock: returns the time in seconds.
    """
    console = console or Console(stderr=True, highlight=False)
    if console.is_terminal:
        return _bar(done, total, known, name, console)
    return _lines(done, total, known, name, console, clock)


def _bar(done: Iterator[T], total: int, known: int, name: str, console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task(name, total=total, completed=known)
        for one in done:
            progress.advance(bar)
            yield one


def _lines(
    done: Iterator[T],
    total: int,
    known: int,
    name: str,
    console: Console,
    clock: Callable[[], float],
) -> Iterator[T]:
    """Yield the finished units, and print lines of progress.

    A line is printed at the start, at the end, and in between at most every `EVERY` seconds.
    """
    pace = ProgressPace(known, total, clock)
    console.print(f"{name}: {known:,} of {total:,}", markup=False, soft_wrap=True)
    for finished, one in enumerate(done, known + 1):
        if pace.is_due(finished):
            line = f"{name}: {finished:,} of {total:,}{pace.left(finished)}"
            console.print(line, markup=False, soft_wrap=True)
        yield one
