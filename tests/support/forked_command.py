"""A program that starts fast, in a pseudo-terminal or between pipes, and may be sent signals."""

from __future__ import annotations

import os
import select
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from forked_chat import fork

_CLOCK = 20.0
_WHERE_IS_THE_CURSOR = b"\x1b[6n"


class ForkedCommand:
    """`python ARGUMENTS`, forked from a process that has the imports of sirchat done.

    Args:
        arguments: of python.
        environ: its whole environment.
        folder: where it runs.
        in_terminal: whether its streams are a pseudo-terminal, or three pipes.
        size: rows and columns of the terminal.
        tells_cursor: whether a question where the cursor is gets an answer.

    Attributes:
        is_in_terminal: as given.
        shown: what it wrote to standard output, or to its terminal.
        errors: what it wrote to standard error; empty in a terminal.
        pid: its process, which leads a session of its own.
    """

    def __init__(
        self,
        *arguments: str,
        environ: Mapping[str, str],
        folder: Path,
        in_terminal: bool,
        size: tuple[int, int] = (40, 100),
        tells_cursor: bool = True,
    ) -> None:
        self.shown = self.errors = b""
        self.is_in_terminal, self._tells_cursor = in_terminal, tells_cursor
        if in_terminal:
            self._input, its = os.openpty()
            termios.tcsetwinsize(its, size)
            theirs, self._outputs, self._errors = [its] * 3, [self._input], -1
            self._terminal: int | None = its  # kept open, for its modes
            self._modes = termios.tcgetattr(its)
        else:
            (read_in, self._input), (out, write_out), (err, write_err) = (
                os.pipe() for _ in range(3)
            )
            theirs, self._outputs, self._errors = [read_in, write_out, write_err], [out, err], err
            self._terminal = None
        ready, begun = os.pipe()
        self._process: BaseProcess = fork(
            arguments,
            environ,
            str(folder),
            dict(enumerate(theirs)),
            in_terminal=in_terminal,
            begun=begun,
            daemon=False,
        )
        self.pid = int(self._process.pid or 0)
        os.close(begun)
        os.read(ready, 1)
        os.close(ready)
        if not in_terminal:
            for one in theirs:
                os.close(one)

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(0)

    def close(self, seconds: float) -> None:
        """Close its terminal or pipes, and kill it if it does not end then in so many seconds."""
        for one in {*self._outputs, self._input, self._terminal}:
            if one is not None and one >= 0:
                os.close(one)
        self._outputs, self._input, self._terminal = [], -1, None
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def code(self) -> int | None:
        """Its exit code, or -signal; None while it runs."""
        return self._process.exitcode

    @property
    def foreground(self) -> int:
        """The process group in the foreground of its terminal."""
        return os.tcgetpgrp(self._input)

    @property
    def processor_seconds(self) -> float:
        """Processor time that it has used so far; 0 if it has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    @property
    def reads_keys(self) -> bool:
        """Whether it has switched its terminal to single keys; lines typed before that wait."""
        return (
            self._terminal is not None and not termios.tcgetattr(self._terminal)[3] & termios.ICANON
        )

    @property
    def has_modes_of_before(self) -> bool:
        """Whether its terminal has the modes that it began with."""
        return self._terminal is None or termios.tcgetattr(self._terminal) == self._modes

    def send(self, text: str) -> None:
        """Type, or write to its standard input; nothing where nobody reads it any more."""
        with suppress(BrokenPipeError):
            os.write(self._input, text.encode())

    def close_input(self) -> None:
        """End its standard input, a pipe."""
        os.close(self._input)
        self._input = -1

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of its window."""
        if self._terminal is not None:
            termios.tcsetwinsize(self._terminal, (rows, columns))

    def kill(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.is_alive:
            os.kill(self.pid, number)

    def read(self, seconds: float) -> bool:
        """Take what it writes within so many seconds; returns whether it wrote anything."""
        ready, _, _ = select.select(self._outputs, [], [], seconds)
        got = False
        for one in ready:
            data = os.read(one, 65536)
            got = got or bool(data)
            if not data:
                self._outputs.remove(one)
                os.close(one)
            elif one == self._errors:
                self.errors += data
            else:
                self.shown += data
            for _ in range(self._tells_cursor * data.count(_WHERE_IS_THE_CURSOR)):
                self.send("\x1b[30;1R")
        return got

    def comes_to(self, mark: str, seconds: float) -> bool:
        """Type a command that is none; whether a chat, done with all before, answers in time."""
        self.send(f"/{mark}\r")
        end = time.monotonic() + seconds
        while f"there is no command /{mark}".encode() not in self.shown:
            if not self.read(0.05) and (not self.is_alive or time.monotonic() > end):
                return False
        return True

    def ended(self, within: float) -> int | None:
        """Its exit code, or -signal; None if it takes more processor time than `within` seconds.

        It may also take `_CLOCK` seconds by the clock.
        """
        used, end = self.processor_seconds, time.monotonic() + _CLOCK
        while self.is_alive:
            self.read(0.02)
            if self.processor_seconds - used > within or time.monotonic() > end:
                return None
        while self.read(0):
            pass
        return self.code

    def left_processes(self) -> list[int]:
        """Processes of its session that are still there."""
        left = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.pid and fields[0] != "Z":
                left.append(int(stat.parent.name))
        return left
