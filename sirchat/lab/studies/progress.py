"""Progress of a study on stderr: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sirchat.text.duration import ProgressPace

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
    """Pass units on as they finish, and report progress.

    Args:
        done: finishes a unit at a time.
        total: number of units.
        known: how many of them were finished before.
        name: of the study.
        console: where to report; by default stderr.
        clock: the time in seconds.
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
    """A line at the start, when a unit ends and one is due, and at the end."""
    pace = ProgressPace(known, total, clock)
    console.print(f"{name}: {known:,} of {total:,}", markup=False, soft_wrap=True)
    for finished, one in enumerate(done, known + 1):
        if pace.is_due(finished):
            line = f"{name}: {finished:,} of {total:,}{pace.left(finished)}"
            console.print(line, markup=False, soft_wrap=True)
        yield one
