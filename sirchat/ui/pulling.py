"""The progress of a download: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from sirchat.models.bars import Progress
from sirchat.ui.models_table import in_bytes
from sirchat.ui.text import displayable_line, shorten

_EVERY = 10.0  # seconds between lines in a log
_LONGEST = 24  # characters of a file's name in a bar
_OTHERS = 48  # columns beside the bar, and for the ^C that a terminal shows


@contextmanager
def pull_progress(console: Console) -> Iterator[Progress]:
    """Yields the function that shows the progress of a download."""
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
    """Writes a line when something has come, then every few seconds, and at the end."""

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
