"""Prints all output, filtered: replies and drawings to stdout, notes and errors to stderr."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from sirchat.chat.events import Event, to_json
from sirchat.ui.cells import cut
from sirchat.ui.interrupt import leave_ctrl_c_to_child
from sirchat.ui.text import DisplayFilter, displayable_line
from sirchat.ui.theme import Theme, find_theme

MIN_ROWS, MIN_COLUMNS = 14, 50  # of a window for drawings; a smaller one gets plain text
_MAX_QUOTE_CELLS = 300  # of the line below an answer: most sentences are shown as a whole


class Screen:
    """Prints to the streams for output, in the colours of a theme.

    Args:
        out: stream for replies; standard output by default.
        err: stream for notices, progress and errors; standard error by default.
        theme: name of a theme, or "auto"; see `sirchat.ui.theme`.
        is_quiet: whether remarks (notes that nobody asked for) are left out.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        theme: str = "auto",
        is_quiet: bool = False,
    ) -> None:
        self.is_quiet = is_quiet
        self._out = out or sys.stdout
        self.console = make_console(self._out, soft_wrap=True)
        is_terminal = (err := err or sys.stderr).isatty()
        self.notes_console = make_console(err, force_terminal=is_terminal)
        self.notes_console.soft_wrap = not is_terminal  # elsewhere a note stays one line
        self._filter = DisplayFilter()
        self.use_theme(theme)

    def use_theme(self, name: str) -> None:
        self.theme: Theme = find_theme(name, os.environ)
        self._error_style = "red" if self.has_colours else "bold"

    @property
    def has_colours(self) -> bool:
        return self.theme.name != "none"

    @property
    def terminal(self) -> TextIO | None:
        """The stream for replies if it is a terminal with escape sequences; otherwise None."""
        return self._out if self._out.isatty() and not self.is_dumb else None

    @property
    def is_dumb(self) -> bool:
        return self.console.is_dumb_terminal

    @property
    def is_interactive(self) -> bool:
        """Whether both replies and notices go to a terminal."""
        return self._out.isatty() and self.notes_console.file.isatty()

    @property
    def width(self) -> int:
        return self.console.size.width

    @property
    def is_plain(self) -> bool:
        """Whether replies are printed as plain text, without colours and redrawing."""
        size = self.console.size
        is_small = size.height < MIN_ROWS or size.width < MIN_COLUMNS
        return self.terminal is None or bool(os.environ.get("NO_COLOR")) or is_small

    def stream(self, text: str) -> None:
        """Print `text`, the next part of a reply, without control characters."""
        self._write(self._filter.push(text))

    def line(self, text: str = "") -> None:
        """Print `text` at the end of a reply's last line, and end this line."""
        self._filter = DisplayFilter()
        self._write(DisplayFilter().push(text) + "\n")

    def json(self, event: Event) -> None:
        """Print an event as one line of JSON, in which control characters are escaped."""
        if event.kind:
            self._write(json.dumps(to_json(event)) + "\n")

    def ring(self) -> None:
        if self.terminal is not None:
            self._write("\a")

    def show(self, drawing: RenderableType) -> None:
        """Print a drawing, such as the panel; its text must contain no control sequences."""
        self.console.print(drawing, soft_wrap=False)

    def page(self, drawing: RenderableType) -> None:
        """Print a drawing; in the pager, if there is one and the window is too small."""
        with self.console.capture() as captured:
            self.show(drawing)
        text = captured.get()
        is_tall = text.count("\n") >= self.console.size.height
        has_reader = self.terminal is not None and sys.stdin is not None and sys.stdin.isatty()
        if not (is_tall and has_reader and _show_in_pager(text)):
            self._write(text)

    def clear(self) -> None:
        self.console.clear()

    def note(self, text: str) -> None:
        """Print `text`, unless empty, to stderr as one dim line without control characters."""
        if text:
            self.notes_console.print(Text(displayable_line(text), style=self.theme.secondary))

    def quote(self, line: str) -> None:
        """Print a line about the sentence that supports an answer; a long one is cut."""
        self.note(cut(displayable_line(line), _MAX_QUOTE_CELLS))

    def remark(self, text: str) -> None:
        """Unless `is_quiet`, print a note that nobody asked for, such as a status line."""
        if not self.is_quiet:
            self.note(text)

    def error(self, text: str) -> None:
        """Print the error message `text` to stderr, as one line."""
        message = displayable_line(f"sirchat: {text}")
        self.notes_console.print(Text(message, style=self._error_style))

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def make_console(stream: TextIO | None = None, **options: Any) -> Console:
    """A console that writes to `stream`, or else to standard output.

    At a terminal it is as wide as the window, whatever an exported COLUMNS says.
    """
    stream, environ = stream or sys.stdout, dict(os.environ)
    with suppress(OSError, ValueError):  # no terminal, or not a stream of the operating system
        os.get_terminal_size(stream.fileno())
        environ = {k: v for k, v in environ.items() if k not in ("COLUMNS", "LINES")}
    return Console(file=stream, highlight=False, markup=False, _environ=environ, **options)


def make_notes_console() -> Console:
    """A console on standard error; bars need a terminal, whatever FORCE_COLOR says."""
    return make_console(sys.stderr, force_terminal=sys.stderr.isatty())


def _show_in_pager(text: str) -> bool:
    """Show a text in $PAGER, or else `less`; False if it is empty, `cat` or can't be started."""
    try:
        pager = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:  # an open quote
        pager = []
    if not pager or pager == ["cat"]:
        return False
    # F: `less` ends at once if all fits; R: it shows colours; X: it leaves the text on the screen.
    # Its last line says how to leave. LESSSECURE: no shell, no editor, and no file is written.
    environ = {"LESS": "FRX -Pq\\ leaves$", **os.environ, "LESSSECURE": "1", "LESSHISTFILE": "-"}
    try:
        with leave_ctrl_c_to_child():
            subprocess.run(pager, input=text.encode(), env=environ, check=False)
    except OSError:
        return False
    return True
