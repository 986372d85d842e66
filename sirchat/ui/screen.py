"""Where everything is printed: answers to stdout, all else to stderr, all of it filtered."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.text import Text

from sirchat.chat.events import Event, to_json
from sirchat.ui.text import DisplayFilter, displayable_line
from sirchat.ui.theme import Theme, theme_named

LEAST_ROWS, LEAST_COLUMNS = 14, 50
"""A window smaller than this gets plain text only."""


class Screen:
    """The terminal, or what stands in for it.

    Args:
        out: answers; standard output by default.
        err: notices, progress, errors; standard error by default.
        theme: the setting of that name; see `sirchat.ui.theme`.
    """

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, *, theme: str = "auto"
    ) -> None:
        self._out = _Counted(out or sys.stdout)
        self.console = Console(file=cast(TextIO, self._out), highlight=False, soft_wrap=True)
        self.notes = Console(file=err or sys.stderr, highlight=False)
        self.notes.soft_wrap = not self.notes.is_terminal  # elsewhere a note stays one line
        self._filter = DisplayFilter()
        self.use_theme(theme)

    def use_theme(self, name: str) -> None:
        """Draw in these colours from now on."""
        self.theme: Theme = theme_named(name, os.environ)
        self._alarm = "red" if self.has_colours else "bold"

    @property
    def has_colours(self) -> bool:
        """Whether the theme in force uses colours."""
        return self.theme.name != "none"

    @property
    def terminal(self) -> TextIO | None:
        """Where answers go, if that is a terminal that knows escape sequences."""
        return cast(TextIO, self._out) if self._out.isatty() and not self.is_dumb else None

    @property
    def is_dumb(self) -> bool:
        """Whether the terminal knows no escape sequences."""
        return self.console.is_dumb_terminal

    @property
    def width(self) -> int:
        """Columns of the window, now."""
        return self.console.size.width

    @property
    def written(self) -> int:
        """Bytes that went to where answers go."""
        return self._out.written

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be drawn by itself: no terminal, a plain or a small one."""
        return (
            not self._out.isatty()
            or self.is_dumb
            or bool(os.environ.get("NO_COLOR"))
            or self.is_small
        )

    @property
    def is_small(self) -> bool:
        """Whether the window has no room for drawings."""
        size = self.console.size
        return size.height < LEAST_ROWS or size.width < LEAST_COLUMNS

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

    def page(self, drawing: RenderableType) -> None:
        """Something drawn that may be long: in the pager when it is taller than the window."""
        options = self.console.options
        rows = len(self.console.render_lines(drawing, options, pad=False))
        pager = shlex.split(os.environ.get("PAGER") or "less")
        is_there = bool(pager) and shutil.which(pager[0]) is not None
        if not self._out.isatty() or rows < self.console.size.height or not is_there:
            self.show(drawing)
            return
        with self.console.capture() as captured:
            self.show(drawing)
        if not _paged(pager, captured.get()):
            self.show(drawing)

    def clear(self) -> None:
        """Clear the window."""
        self.console.clear()

    def note(self, text: str) -> None:
        """One quiet line beside the answers."""
        self.notes.print(Text(displayable_line(text), style=self.theme.quiet))

    def error(self, text: str) -> None:
        """One line that says what went wrong."""
        self.notes.print(Text(displayable_line(f"sirchat: {text}"), style=self._alarm))


def _paged(pager: list[str], text: str) -> bool:
    """Show a text in the pager, whose own Ctrl-C is; false where it can't be started."""
    environ = {"LESS": "FRX", **os.environ}  # colours, and leave the text on the screen
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a program that is run starts afresh
    try:
        subprocess.run(pager, input=text.encode(), env=environ, check=False)
    except OSError:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True


class _Counted:
    """A stream that counts the bytes written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written = 0

    def write(self, text: str) -> int:
        self.written += len(text.encode("utf-8", "replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
