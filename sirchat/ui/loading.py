"""A progress bar while a model loads: on a terminal only, and removed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars

from sirchat.models.bars import Progress
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line


@contextmanager
def loading_bar(screen: Screen, name: str) -> Iterator[Progress | None]:
    """Show a bar for loading `name`; yields the progress callback, or None without a bar."""
    if not screen.notes.is_terminal or screen.notes.is_dumb_terminal:
        yield None
        return
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=30))
    with bars.Progress(*columns, console=screen.notes, transient=True) as shown:
        task = shown.add_task(f"loading {displayable_line(name)}", total=None)

        def report(step: str, done: int, total: int | None) -> None:
            shown.update(task, description=displayable_line(step), completed=done, total=total)

        yield report
