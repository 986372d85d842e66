"""A program of another Python, in a process of its own, that does one side of a comparison."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from sirchat.errors import SettingError


class Worker:
    """A running program that reads commands, a JSON list a line, and answers each with a number.

    A context manager. Raises SettingError if it can't be started.

    Args:
        python: the Python that runs it.
        program: the file of the program.
    """

    def __init__(self, python: str, program: Path) -> None:
        self._command = [python, str(program)]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True
            )
        except OSError as error:
            raise SettingError(f"{self._command[0]!r} can't be run: {error.strerror}") from None

    def ask(self, *command: object) -> float:
        """The answer to a command; raises ChildProcessError if the process ends at it."""
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        with suppress(BrokenPipeError):
            pipes.stdin.write(json.dumps(command) + "\n")
            pipes.stdin.flush()
        answer = pipes.stdout.readline()
        if not answer:
            raise ChildProcessError(f"it ended with {pipes.wait()} at {command[0]!r}")
        return float(answer)

    def restart(self) -> None:
        """End the process, and start another one."""
        self.close()
        self._process = self._started()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()
