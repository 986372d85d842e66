"""Where everything is printed: answers to stdout, all else to stderr, all of it filtered."""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from sirchat.events import Event, to_json
from sirchat.ui.text import DisplayFilter, displayable_line


class Screen:
    """The terminal, or what stands in for it.

    Args:
        out: answers; standard output by default.
        err: notices, progress, errors; standard error by default.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self.console = Console(file=self._out, highlight=False, soft_wrap=True)
        self._notes = Console(file=err or sys.stderr, highlight=False, soft_wrap=True)
        self._filter = DisplayFilter()

    @property
    def is_plain(self) -> bool:
        """Whether output is for a file, a pipe, or a terminal that wants no drawing."""
        return not self._out.isatty() or os.environ.get("TERM") == "dumb"

    def stream(self, text: str) -> None:
        """A piece of an answer, as it comes."""
        self._out.write(self._filter.push(text))
        self._out.flush()

    def line(self, text: str = "") -> None:
        """End a line of an answer."""
        self._filter = DisplayFilter()
        self._out.write(DisplayFilter().push(text) + "\n")
        self._out.flush()

    def json(self, event: Event) -> None:
        """A record as one line of JSON; control characters come out escaped."""
        if event.kind:
            self._out.write(json.dumps(to_json(event)) + "\n")
            self._out.flush()

    def show(self, drawing: RenderableType) -> None:
        """Something drawn, such as the panel; its text has been filtered by who drew it."""
        self.console.print(drawing, soft_wrap=False)

    def note(self, text: str) -> None:
        """One quiet line beside the answers."""
        self._notes.print(Text(displayable_line(text), style="dim"))

    def error(self, text: str) -> None:
        """One line that says what went wrong."""
        self._notes.print(Text(displayable_line(f"sirchat: {text}"), style="red"))
