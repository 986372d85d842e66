"""Shows the progress of long work on stderr: a bar in a terminal, else lines of text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sirchat.ui.screen import make_notes_console

EVERY = 30.0  # the fewest seconds between two lines in a log file

T = TypeVar("T")
Show = Callable[[float, float, str], None]  # takes the amount done, the total amount, and a text


def duration(seconds: float) -> str:
    """A duration as text such as `40 s`, `3 min` or `2 h 5 min`."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


@contextmanager
def shown_progress(
    console: Console, name: str, clock: Callable[[], float] = time.monotonic, prefix: str = ""
) -> Iterator[Show]:
    """Yield a function that shows progress: as a bar, or in lines that begin with `prefix`."""
    if not console.is_terminal:
        yield _Lines(console, clock, prefix).show
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=bool(prefix)) as progress:
        bar = progress.add_task(name, total=None)
        yield lambda done, total, text: progress.update(
            bar, completed=done, total=total, description=text or name
        )


class _Lines:
    """Prints lines of progress: the first, at most one every 30 seconds, and the last."""

    def __init__(self, console: Console, clock: Callable[[], float], prefix: str) -> None:
        self._console, self._clock, self._prefix = console, clock, prefix
        self._printed, self._start = -math.inf, (0.0, 0.0)  # amount and time of the first call

    def show(self, done: float, total: float, text: str) -> None:
        now, left = self._clock(), ""
        if done < total and now - self._printed < EVERY:
            return
        if self._printed == -math.inf:
            self._start = done, now
        before, began = self._start
        if before < done < total:
            left = f", {duration((now - began) / (done - before) * (total - done))} left"
        self._printed = now
        line = f"{self._prefix}{done:,.0f} of {total:,.0f} {text}".rstrip() + left
        self._console.print(line, markup=False, soft_wrap=True)


def with_progress(
    done: Iterator[T],
    total: int,
    known: int,
    name: str,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the units of a study as they finish; an earlier run has finished `known` units."""
    console = console or make_notes_console()
    with shown_progress(console, name, clock, f"{name}: ") as show:
        show(known, total, "")
        for finished, unit in enumerate(done, known + 1):
            show(finished, total, "")
            yield unit
