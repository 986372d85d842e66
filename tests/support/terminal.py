"""A chat in a pseudo-terminal; a terminal emulator reads its screen."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Self

import pyte
from pyte.charsets import LAT1_MAP
from pyte.modes import DECAWM, DECTCEM, IRM
from pyte.screens import Char

from forked_command import ForkedCommand

_WRAPS = -1  # a column whose cell marks a row that is wrapped into the next one
PASTE_ON, PASTE_OFF = "\x1b[200~", "\x1b[201~"
WARM = "warm python"  # A program: a python that has imported what a chat needs
_EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
_PROMPT_ENDS = b"\x1b[?2004l"  # sent when a prompt has read its line: bracketed paste goes off
_SYNCHRONIZED = 2026 << 5  # pyte's number of this private mode


class Emulator(pyte.HistoryScreen):  # type: ignore[misc]
    """A screen that keeps the rows that scroll off; it takes a third of the time of pyte's own.

    pyte's looks at every access to an attribute whether the screen shows an older page, and the
    tests never turn pages. What is drawn is the same.
    """

    __getattribute__ = object.__getattribute__

    def __init__(self, *size: int, **history: Any) -> None:
        super().__init__(*size, **history)
        self._known: list[tuple[Any, str]] = []
        self._known_columns = 0

    @property
    def scrolled(self) -> list[str]:
        """The text of the rows that scrolled off, which change no more: each is read once."""
        known, top = self._known, self.history.top
        is_same = self.columns == self._known_columns and len(known) <= len(top)
        if known and not (is_same and top[len(known) - 1] is known[-1][0]):
            known.clear()
        self._known_columns = self.columns
        known += [(cells, _row(self, cells)) for cells in islice(top, len(known), None)]
        return [text for _, text in known]

    def draw(self, data: str) -> None:
        """Write text where the cursor is."""
        cursor = self.cursor
        is_plain = (
            data.isascii()
            and data.isprintable()
            and cursor.x + len(data) <= self.columns
            and not self.charset
            and self.g0_charset is LAT1_MAP
            and IRM not in self.mode
        )
        if not is_plain:
            super().draw(data)
            return
        line, (_, *style) = self.buffer[cursor.y], cursor.attrs
        for x, char in enumerate(data, cursor.x):
            line[x] = Char(char, *style)
        cursor.x += len(data)
        self.dirty.add(cursor.y)

    def restore_cursor(self) -> None:
        """Put the cursor back where it was saved; whether it is hidden does not change."""
        super().restore_cursor()
        self.cursor.hidden = DECTCEM not in self.mode


class Reflowing(Emulator):
    """A screen that wraps its rows anew when its width changes, as most terminals do."""

    def draw(self, data: str) -> None:
        """Write text, and mark rows that are wrapped into the next one."""
        for char in data:
            if self.cursor.x == self.columns and DECAWM in self.mode:
                self.buffer[self.cursor.y][_WRAPS] = self.cursor.attrs
            super().draw(char)

    def reflow(self, rows: int, columns: int) -> None:
        """Change the size; the cursor stays at its character, and in the window."""
        shown = [self.buffer[y] for y in range(self.lines)]
        lines: list[list[Char]] = [[]]
        at, begun = (0, 0), len(self.history.top)
        for y, row in enumerate([*self.history.top, *shown]):
            if y - begun == self.cursor.y:
                at = len(lines) - 1, len(lines[-1]) + self.cursor.x
            used = max((x for x in row if x != _WRAPS and row[x].data.strip()), default=-1) + 1
            lines[-1] += [row[x] for x in range(min(used, self.columns))]
            if used < self.columns or _WRAPS not in row:
                lines.append([])
        wrapped: list[dict[int, Char]] = []
        for number, line in enumerate(lines):
            if number == at[0]:
                cursor = len(wrapped) + at[1] // columns, at[1] % columns
            for x in range(0, max(1, len(line)), columns):
                more = {_WRAPS: line[x]} if x + columns < len(line) else {}
                wrapped.append(dict(enumerate(line[x : x + columns])) | more)
        last = max((y for y, row in enumerate(wrapped) if row), default=0)
        last = max(last, cursor[0])
        top = min(max(0, last - rows + 1), cursor[0])
        self.history.top.clear()
        self.history.top.extend(wrapped[:top])
        self.resize(rows, columns)
        self.erase_in_display(2)
        for y, row in enumerate(wrapped[top : top + rows]):
            self.buffer[y].update(row)
        self.cursor.y, self.cursor.x = cursor[0] - top, cursor[1]


class Terminal:
    """Runs a command and keeps what its screen shows.

    Args:
        command: program and arguments. Without a program, or if the program is `WARM`, it starts
            fast: sirchat with these flags, or what python runs with these arguments.
        home: the folder of its files.
        rows, columns: the window.
        environ: more environment.
        screen: the emulator.
    """

    def __init__(
        self,
        *command: str,
        home: Path,
        rows: int = 40,
        columns: int = 100,
        environ: dict[str, str] | None = None,
        screen: type[Emulator] = Emulator,
    ) -> None:
        self.screen = screen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._said = ""
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        env |= {"SIRCHAT_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": ""}
        env["PAGER"] = "cat"  # what is taller than the window is printed, unless a test has a pager
        env["SIRCHAT_TEMPERATURE"] = "0"  # replies that can be predicted, of any model
        env["SIRCHAT_PANEL"] = "live"  # and none above the prompt, which would follow each output
        env["COLORFGBG"] = "15;0"  # otherwise a chat asks the emulator, which does not answer
        env["SIRCHAT_MODEL"] = "tiny"  # otherwise a bare `sirchat` asks which model to use
        env |= environ or {}
        if not command or command[0].startswith("-"):
            command = (WARM, "-m", "sirchat", *command)
        self.child = ForkedCommand(
            *(command[1:] if command[0] == WARM else ("-c", _EXECUTE, *command)),
            environ=env,
            folder=Path.cwd(),
            in_terminal=True,
            size=(rows, columns),
            tells_cursor=False,
        )
        self.screen.write_process_input = self.child.send  # answers, such as where the cursor is

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.close(1)

    @property
    def raw(self) -> bytes:
        """All that the program wrote."""
        return self.child.shown

    def read(self, seconds: float = 0.05) -> bool:
        """Take what the program writes within so many seconds; False once it has ended."""
        before = len(self.raw)
        if not self.child.read(seconds) and not self.child.is_alive and not self.child.read(0):
            return False
        self._stream.feed(self.raw[before:])
        return True

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Read until a condition holds; the error of a timeout shows the screen."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.read() and not condition():
                raise AssertionError(f"the program ended; its screen:\n{self.text}")
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s; the screen:\n{self.text}")

    def settle(self, seconds: float = 0.4) -> None:
        """Read until nothing more comes for so long."""
        while True:
            before = len(self.raw)
            self.read(seconds)
            if len(self.raw) == before:
                return

    def wait(self, pattern: str, seconds: float = 60) -> None:
        """Read until the screen or what scrolled off it matches."""
        self.until(lambda: re.search(pattern, self.everything), seconds)

    def wait_screen(self, pattern: str, seconds: float = 60) -> None:
        """Read until the screen matches."""
        self.until(lambda: re.search(pattern, self.text), seconds)

    def wait_prompt(self, seconds: float = 60) -> None:
        """Read until the prompt is empty and waits for input."""
        self.until(self._at_prompt, seconds)

    def wait_suggested(self, line: str, seconds: float = 60) -> None:
        """Read until the prompt suggests this line, and nothing is typed."""

        def is_suggested() -> bool:
            cursor = self.screen.cursor
            return bool(cursor.x == 2) and self.lines[cursor.y] == f"> {line}"

        self.until(is_suggested, seconds)

    def send(self, text: str) -> None:
        """Type."""
        self.child.send(text)

    def say(self, line: str) -> None:
        """Type a line at the next prompt, and wait until the prompt has read it."""
        self.wait_prompt()
        self.screen.history.top.clear()
        self._said = line
        self.submit(line + "\r")

    def submit(self, keys: str = "\r") -> None:
        """Type what ends the present prompt, and wait until it has ended."""
        before = self.raw.count(_PROMPT_ENDS)
        self.send(keys)
        self.until(lambda: self.raw.count(_PROMPT_ENDS) > before)

    def ask(self, line: str) -> str:
        """Send a line; returns what is shown below it until the next prompt."""
        self.say(line)
        self.wait_prompt()
        return self.shown

    def begin_reply(self, message: str = "Go on.") -> None:
        """Send a message, and wait until the reply is well under way."""
        self.say(message)
        self.until(lambda: len(self.shown) > 400)

    def read_on(self) -> None:
        """Wait until a reply has gone on for a while."""
        before = len(self.raw)
        self.until(lambda: len(self.raw) > before + 2000)

    @property
    def shown(self) -> str:
        """The text below the last line that was sent, up to the prompt if there is one."""
        rows = self.everything.split("\n")
        echo = max(i for i, row in enumerate(rows) if row.startswith(f"> {self._said[:40]}"))
        beneath = rows[echo + 1 :]
        return "\n".join(takewhile(lambda row: row != ">", beneath)).rstrip()

    def paste(self, text: str) -> None:
        """Paste, as a terminal does that marks pastes."""
        self.send(PASTE_ON + text + PASTE_OFF)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window, but not within a frame: terminals apply such output at once."""
        while _SYNCHRONIZED in self.screen.mode and self.read():
            pass
        resize(self.screen, rows, columns)
        self.child.resize(rows, columns)

    def leave(self) -> int:
        """Ctrl-D at the prompt; returns the exit code."""
        self.wait_prompt()
        self.send("\x04")
        return self.ended()

    def ended(self) -> int:
        """Read to the end; returns the exit code."""
        self.until(lambda: not self.child.is_alive)
        while self.read(0):
            pass
        return int(self.child.code or 0)

    @property
    def lines(self) -> list[str]:
        """The rows of the screen, without blanks at their ends."""
        return lines_of(self.screen)

    @property
    def text(self) -> str:
        """The screen."""
        return "\n".join(self.lines).rstrip("\n")

    @property
    def everything(self) -> str:
        """What scrolled off since the last line was sent, and the screen."""
        return everything_on(self.screen)

    def _at_prompt(self) -> bool:
        """The cursor stands behind an empty prompt, and the toolbar is drawn beneath it."""
        cursor = self.screen.cursor
        if cursor.x != 2 or _row(self.screen, self.screen.buffer[cursor.y]) != ">":
            return False
        return any(" held" in row for row in self.lines[cursor.y + 1 :])


def lines_of(screen: pyte.HistoryScreen) -> list[str]:
    """The rows of a screen, without blanks at their ends."""
    return [_row(screen, screen.buffer[y]) for y in range(screen.lines)]


def everything_on(screen: Emulator) -> str:
    """What scrolled off, and the screen."""
    return "\n".join([*screen.scrolled, *lines_of(screen)]).rstrip("\n")


def resize(screen: pyte.HistoryScreen, rows: int, columns: int) -> None:
    """Resize as xterm does: rows above the cursor scroll off, nothing reflows, but `Reflowing`."""
    if isinstance(screen, Reflowing):
        screen.reflow(rows, columns)
        return
    y = screen.cursor.y
    for _ in range(y + 1 - rows):
        screen.cursor.y = screen.lines - 1
        screen.index()
        y -= 1
    for gone in range(rows, screen.lines):
        screen.buffer.pop(gone, None)
    screen.lines = min(screen.lines, rows)
    screen.resize(rows, columns)
    screen.cursor.y, screen.cursor.x = y, min(screen.cursor.x, columns - 1)


def _row(screen: pyte.HistoryScreen, cells: Any) -> str:
    """The text of a row; faster than pyte's own."""
    width = min(screen.columns, max(cells, default=-1) + 1)
    return "".join([cells[x].data for x in range(width)]).rstrip()


def program(path: Path, script: str) -> str:
    """Write a shell script that can be run, such as an editor or a pager; returns the path."""
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def pager_into(file: Path) -> str:
    """A pager, made beside a file, that writes its input to the file."""
    return program(file.with_suffix(".sh"), f"cat > {file}")
