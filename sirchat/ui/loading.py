"""A bar while a model is loaded; on a terminal only, and gone when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line

Report = Callable[[str, int, int | None], None]
"""What is done, how much of it, of how much."""


@contextmanager
def loading_bar(screen: Screen, name: str) -> Iterator[Report | None]:
    """Show a bar for loading `name`; gives where to report to, or None where none is shown."""
    if not screen.notes.is_terminal or screen.notes.is_dumb_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn())
    with Progress(*columns, console=screen.notes, transient=True) as progress:
        task = progress.add_task(f"loading {displayable_line(name)}", total=None)

        def report(what: str, done: int, total: int | None) -> None:
            progress.update(task, description=displayable_line(what), completed=done, total=total)

        yield report
