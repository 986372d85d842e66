"""Starts a chat in a pseudo-terminal, and times when its prompt, typed keys and reply appear.

The keys are typed while the model loads.
"""

from __future__ import annotations

import os
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from sirchat.errors import ModelError
from sirchat.lab.bench.start_worker import StartFigures, fresh_home

# The key that is typed. It appears nowhere else on the screen, and triggers no completion
_KEY = b"%"

_KEYS_APART = 0.05  # seconds from one key to the next
_PATIENCE = 600.0  # the most seconds that each wait may take
_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\s")
_PROMPT_OPENS, _PROMPT_ENDS, _CURSOR_ON = b"\x1b[?2004h", b"\x1b[?2004l", b"\x1b[?25h"
_WHERE_IS_CURSOR, _CURSOR_IS_HERE = b"\x1b[6n", b"\x1b[1;1R"
_FLAGS = ("--quiet", "--no-save", "--no-markdown", "--panel=off", "--max-new-tokens=8")


def time_prompt(settings: Sequence[str]) -> StartFigures:
    """Start a chat with the command-line flags `settings`, and time what appears on its screen.

    The times are those of `start.py`, in seconds. Raises ModelError, of one line, if the chat ends.
    """
    with fresh_home() as home:
        chat = _Chat(settings, home)
        try:
            prompt = chat.until(lambda: _CURSOR_ON in chat.raw.partition(_PROMPT_OPENS)[2])
            echoes = list[float]()
            while b" held" not in chat.raw:
                echoes.append(chat.echo())
                chat.read(_KEYS_APART)
            ready = chat.until(lambda: True)
            before = len(chat.raw)
            chat.send(b"\r")
            chat.until(lambda: _PROMPT_ENDS in chat.raw[before:])
            below = before + chat.raw[before:].index(_PROMPT_ENDS)
            reply = chat.until(lambda: _SEQUENCE.sub(b"", chat.raw[below:]))
        finally:
            chat.close()
    times = {"prompt": prompt, "ready": ready, "reply": reply}
    echo, most = statistics.median(echoes or [0.0]), max(echoes, default=0.0)
    return times | {"echo": echo, "echo_most": most}


class _Chat:
    """A chat process in a pseudo-terminal.

    `raw` has all bytes that the chat has written to the terminal.
    """

    def __init__(self, settings: Sequence[str], home: str) -> None:
        self.raw = b""
        self._ours, its = _open_terminal()
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SIRCHAT_HOME": home,
            "TERM": "xterm-256color",
        }
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sirchat", *_FLAGS, *settings],
            stdin=its,
            stdout=its,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        os.close(its)

    def send(self, keys: bytes) -> None:
        """Send the bytes `keys` to the chat, as if a user typed them."""
        os.write(self._ours, keys)

    def echo(self) -> float:
        """Type a key in the chat; returns the seconds until the key appears on the screen."""
        begun, before = time.perf_counter(), self.raw.count(_KEY)
        self.send(_KEY)
        self.until(lambda: self.raw.count(_KEY) > before)
        return time.perf_counter() - begun

    def until(self, condition: Callable[[], object]) -> float:
        """Read the chat's output until a call of `condition` returns true.

        Raises ModelError if the chat ends first, or if the condition is still false after _PATIENCE
        seconds.
        """
        end = time.perf_counter() + _PATIENCE
        while not condition():
            if not self.read(0.005):
                assert self._process.stderr is not None
                said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
                problem = (
                    said[-1] if said else f"the chat ended with exit code {self._process.wait()}"
                )
                raise ModelError(problem.removeprefix("sirchat: "))
            if time.perf_counter() > end:
                raise ModelError(f"the chat did not answer within {_PATIENCE:.0f} seconds")
        return time.perf_counter() - self._begun

    def read(self, seconds: float) -> bool:
        """Wait at most `seconds` for output of the chat, and append the output to `raw`.

        Returns False if the chat has ended, else True.
        """
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            return False
        if _WHERE_IS_CURSOR in data:
            self.send(_CURSOR_IS_HERE)
        self.raw += data
        return bool(data)

    def close(self) -> None:
        """Kill the chat's process, and close its terminal."""
        self._process.kill()
        self._process.communicate()
        os.close(self._ours)


def _open_terminal() -> tuple[int, int]:
    """Open a pseudo-terminal; returns the descriptors of its two ends."""
    if sys.platform == "win32":
        raise ModelError("a prompt is measured in a pseudo-terminal, which Windows lacks")
    import termios

    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, 80))
    return ours, its
