"""Draws progress bars on a terminal: while a model loads, and while a model is downloaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from sirchat.models.progress import Progress
from sirchat.ui.lists import in_bytes
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, shorten
from sirchat.ui.theme import Theme

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def draw_bar(name: str, done: int, total: int, theme: Theme, width: int) -> Text:
    """Draw a progress bar for tokens in one row: `reading ████▌ 512 of 4,096 tokens`."""
    head, tail = f"{name} ", f" {done:,} of {total:,} tokens"
    room = max(4, min(40, width - 1 - len(head) - len(tail)))
    eighths = 8 * room * min(done, total) // max(1, total)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    text = Text(no_wrap=True, overflow="crop")
    text.append(head, theme.quiet)
    text.append(bar.ljust(room), theme.gauge)
    text.append(tail, theme.quiet)
    return text


@contextmanager
def loading_bar(screen: Screen, name: str) -> Iterator[Progress | None]:
    """Context manager: show a progress bar while the model `name` loads.

    Yields the function that moves the bar, or None if the output can show no bar.
    """
    if not screen.notes.is_terminal or screen.notes.is_dumb_terminal:
        yield None
        return
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=30))
    with bars.Progress(*columns, console=screen.notes, transient=True) as shown:
        task = shown.add_task(f"loading {displayable_line(name)}", total=None)

        def report(step: str, done: int, total: int | None) -> None:
            shown.update(task, description=displayable_line(step), completed=done, total=total)

        yield report


_EVERY = 10.0  # seconds between lines in a log
_LONGEST = 24  # characters of a file's name in a bar
_OTHERS = 48  # columns beside the bar, and for the ^C that a terminal shows


@contextmanager
def pull_progress(console: Console) -> Iterator[Progress]:
    """Context manager: yields a function that shows the progress of a model's download.

    The function shows a bar on a terminal, and lines of a log elsewhere.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield _Log(console)
        return
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=max(4, min(40, console.width - _OTHERS))),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.fields[size]}"),
        bars.TimeRemainingColumn(compact=True),
    )
    with bars.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=None, size="")

        def report(file: str, done: int, total: int | None) -> None:
            name = shorten(displayable_line(file), _LONGEST)
            shown.update(task, description=name, completed=done, total=total, size=in_bytes(total))

        yield report


class _Log:
    """Prints the progress of a download as lines, where no bar can be drawn.

    It prints a line when the download begins, then one every 10 seconds, and one when it ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._is_done = False

    def __call__(self, file: str, done: int, total: int | None) -> None:
        now, ends = time.monotonic(), done == total
        if done == 0 or (now < self._next and not ends) or self._is_done:
            return
        self._next, self._is_done = now + _EVERY, ends
        line = f"{file}: {in_bytes(done)} of {in_bytes(total)}"
        self._console.print(Text(displayable_line(line)), soft_wrap=True)
