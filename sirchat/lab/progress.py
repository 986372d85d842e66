"""Reports the progress of long work, such as a study or a training, on stderr.

Progress is a bar in a terminal, and lines of text in a log file.
"""

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
        clock: returns the current time in seconds.
    """

    def __init__(self, done: float, total: float, clock: Callable[[], float]) -> None:
        self._before, self._total, self._clock = done, total, clock
        self._started = self._printed = self._now = clock()

    def is_due(self, done: float) -> bool:
        """Whether to write a line of progress now, after the amount `done` of the work is done.

        True at the end of the work, and if the last line is at least `EVERY` seconds old.
        """
        self._now = self._clock()
        is_due = done >= self._total or self._now - self._printed >= EVERY
        if is_due:
            self._printed = self._now
        return is_due

    def left(self, done: float) -> str:
        """The estimated time until the work is finished, as text such as `, 3 min left`.

        `done` is the amount of work that is done. At the start and at the end of the work the text
        is empty. The current time is that of the last call of `is_due`.
        """
        if not self._before < done < self._total:
            return ""
        seconds = (self._now - self._started) / (done - self._before) * (self._total - done)
        return f", {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration, given in seconds, as text such as `40 s`, `3 min` or `2 h 5 min`."""
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
    """Yield the finished units of a study (its independent runs), and report the progress.

    Progress is a bar if `console` is a terminal, else lines of text.

    Args:
        done: yields each unit as soon as it is finished.
        total: number of all units of the study.
        known: number of units that an earlier, interrupted run of the study has finished.
        name: name of the study.
        console: where to report the progress; by default stderr.
        clock: returns the current time in seconds.
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
    """Yield the finished units of a study, and print lines of progress.

    A line is printed at the start, at the end, and between them at most every `EVERY` seconds.
    """
    pace = ProgressPace(known, total, clock)
    console.print(f"{name}: {known:,} of {total:,}", markup=False, soft_wrap=True)
    for finished, one in enumerate(done, known + 1):
        if pace.is_due(finished):
            line = f"{name}: {finished:,} of {total:,}{pace.left(finished)}"
            console.print(line, markup=False, soft_wrap=True)
        yield one
