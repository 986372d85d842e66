"""A chat in a real pseudo-terminal, its screen read by a terminal emulator."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pexpect
import pyte

from warm import Warm

PASTE_ON, PASTE_OFF = "\x1b[200~", "\x1b[201~"

_PROMPT_ENDS = b"\x1b[?2004l"
"""What is sent when a prompt has been answered: no more marking of pastes."""


class Terminal:
    """Runs a command and keeps what its screen shows.

    Args:
        command: program and arguments; sirchat's own when it begins with a flag or is empty.
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
        screen: type[pyte.HistoryScreen] = pyte.HistoryScreen,
    ) -> None:
        self.screen = screen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._said = ""
        self._size = (rows, columns)
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        env |= {"SIRCHAT_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": ""}
        env |= environ or {}
        self.child: Any
        if not command or command[0].startswith("-"):
            self.child = Warm(command, env, self._size, timeout=60)
        else:
            program, *arguments = command
            self.child = pexpect.spawn(
                program, arguments, env=env, dimensions=self._size, timeout=60
            )
        self.child.delaybeforesend = None
        self.screen.write_process_input = self.child.send  # answers, such as where the cursor is

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.close(force=True)

    def read(self, seconds: float = 0.05) -> bool:
        """Take what was written within so many seconds; False at the end of the program."""
        try:
            data = self.child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def until(self, is_so: Callable[[], object], seconds: float = 60) -> None:
        """Read until something holds; fails with the screen."""
        end = time.monotonic() + seconds
        while not is_so():
            if not self.read() and not is_so():
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

    def send(self, text: str) -> None:
        """Type."""
        self.child.send(text)

    def say(self, line: str) -> None:
        """Type a line at the prompt, once it is there, and wait until it is taken."""
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
        """Say a line; what was shown beneath it until the next prompt."""
        self.say(line)
        self.wait_prompt()
        return self.shown

    @property
    def shown(self) -> str:
        """What stands beneath the line that was said last, up to the prompt if there is one."""
        rows = self.everything.split("\n")
        echo = max(i for i, row in enumerate(rows) if row.startswith(f"> {self._said[:40]}"))
        beneath = rows[echo + 1 :]
        return "\n".join(takewhile(lambda row: row != ">", beneath)).rstrip()

    def paste(self, text: str) -> None:
        """Paste, as a terminal does that marks pastes."""
        self.send(PASTE_ON + text + PASTE_OFF)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window."""
        resize(self.screen, rows, columns)
        self.child.setwinsize(rows, columns)

    def restore_size(self) -> None:
        """The window as it was opened."""
        if (self.screen.lines, self.screen.columns) != self._size:
            self.resize(*self._size)
            self.wait_prompt()

    def leave(self) -> int:
        """Ctrl-D at the prompt; returns the exit code."""
        self.wait_prompt()
        self.send("\x04")
        return self.ended()

    def ended(self) -> int:
        """Read to the end; returns the exit code."""
        while self.read(1):
            pass
        self.child.close()
        status = self.child.exitstatus
        return int(status if status is not None else -self.child.signalstatus)

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
        """What scrolled off since a line was said last, and the screen."""
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


def everything_on(screen: pyte.HistoryScreen) -> str:
    """What scrolled off, and the screen."""
    scrolled = [_row(screen, cells) for cells in screen.history.top]
    return "\n".join([*scrolled, *lines_of(screen)]).rstrip("\n")


def resize(screen: pyte.HistoryScreen, rows: int, columns: int) -> None:
    """Do as xterm does: rows above the cursor scroll off, nothing reflows."""
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
    return "".join(cells[x].data for x in range(screen.columns)).rstrip() if cells else ""


class Shared:
    """One chat that many tests use in turn: opened once, and anew when a test left it astray."""

    def __init__(self, open_chat: Callable[[], Terminal]) -> None:
        self._open = open_chat
        self._chat: Terminal | None = None

    def anew(self) -> Terminal:
        """The chat at its prompt: nothing said yet, and the settings as built in."""
        try:
            if self._chat is not None:
                self._chat.wait_prompt(10)
        except AssertionError:
            self.close()
        if self._chat is None:
            self._chat = self._open()
        self._chat.restore_size()
        self._chat.ask("/profile default")
        self._chat.ask("/reset")
        return self._chat

    def close(self) -> None:
        """End the chat."""
        if self._chat is not None:
            self._chat.child.close(force=True)
            self._chat = None


def pager_into(file: Path) -> str:
    """A pager, made beside a file, that writes what it is given into the file."""
    script = file.with_suffix(".sh")
    script.write_text(f"#!/bin/sh\ncat > {file}\n", encoding="utf-8")
    script.chmod(0o755)
    return str(script)
