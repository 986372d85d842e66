"""Progress of a study on stderr: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sirchat.text.duration import duration

T = TypeVar("T")

EVERY = 30.0
"""Least number of seconds between two lines in a log file."""


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
    report = _bar if console.is_terminal else _lines
    return report(done, total, known, name, console, clock)


def _bar(
    done: Iterator[T],
    total: int,
    known: int,
    name: str,
    console: Console,
    clock: Callable[[], float],
) -> Iterator[T]:
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
    """A line at the start, when a unit ends and `EVERY` seconds have passed, and at the end."""
    started = last = clock()
    console.print(f"{name}: {known:,} of {total:,}", markup=False, soft_wrap=True)
    for number, one in enumerate(done, 1):
        now, finished = clock(), known + number
        if finished == total or now - last >= EVERY:
            last = now
            left = (now - started) / number * (total - finished)
            time_left = f", {duration(left)} left" if finished < total else ""
            line = f"{name}: {finished:,} of {total:,}{time_left}"
            console.print(line, markup=False, soft_wrap=True)
        yield one
