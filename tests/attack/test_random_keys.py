"""Random keys in a chat, with changes of the window: no error, no dead prompt, a whole terminal.

`SIRCHAT_ATTACK=300` opens as many chats.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random

import pytest

from attacking import attack
from command_home import CommandHome, Wrong, check_end
from forked_command import ForkedCommand

_KEYS = (
    "\x1b", "\x1b\r", "\x1bb", "\x1b\x7f", "\x1b[", "\x1bO", "\x1b[13;2u", "\x1b[27;2;13~",
    "\x1b[27u", "\x1b[99;5u", "\x1b[97;3u", "\x1b[13;", "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D",
    "\x1b[H", "\x1b[3~", "\x1b[1;5D", "\x1b[M !!", "\x1b[<0;5;5M", "\x1b[I", "\x1b[200~",
    "\x1b[201~", "\x1b[200~/exit\x1b[201~", "\x1b[200~a\nb @x\n\x1b[201~", "\x1b_x",
    "\x1b]11;?\x07", "\r", "\r", "\n", "\t", "\x7f", "\x03", "\x12", "\x13", "\x07", "\x15",
    "\x17", "\x19", "\x1f", "\x18\x05", "\x01", "\x0b", "/", "//", '"""', "@", "\\", "words ",
    "hello\r", "é", "👍🏽", "/panel\r", "/load\r", "/edit\r", "/undo\r", "/set panel turn\r",
    "/recall\r", "/summarize\r", "/help\r", "n", "/pin ", "words 東京 👍 " * 12,
)  # fmt: skip
_ENDS = ("Ctrl-D", "/exit", "exit", signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOADED = b"policy salience"  # the line that greets
_SECONDS = 60.0  # most time from the last key to a prompt that works


def _session(folder: Path, draw: Random) -> None:
    """One chat; raises Wrong."""
    own = Path(tempfile.mkdtemp(dir=folder))
    home = CommandHome(own, SIRCHAT_MAX_NEW_TOKENS="60", EDITOR="true", VISUAL="")
    flags = draw.choice([(), ("--panel", "off"), ("--no-markdown",)])
    with home.run(*flags, in_terminal=True) as chat:
        waits = draw.random() < 0.8  # else keys come while it loads
        end = time.monotonic() + _SECONDS
        while chat.is_alive and (_LOADED not in chat.shown if waits else not chat.reads_keys):
            chat.read(0.02)
            if time.monotonic() > end:
                raise Wrong(f"does not start: {chat.shown[-500:]!r}")
        for _ in range(draw.randint(5, 40)):
            key = draw.choice(_KEYS)
            chat.send(key)
            if draw.random() < 0.15:
                chat.resize(draw.randint(3, 60), draw.randint(8, 160))
                chat.kill(signal.SIGWINCH)
            if draw.random() < 0.4:
                chat.read(draw.choice((0.001, 0.03, 0.2)))
        if not _finds_prompt(chat):
            check_end(chat, signal.SIGINT, {130})
            return
        how = draw.choice(_ENDS)
        if isinstance(how, signal.Signals):
            chat.kill(how)
            check_end(chat, how, {128 + how})
        else:
            chat.send("\x04" if how == "Ctrl-D" else f"{how}\r")
            check_end(chat, signal.SIGINT, {0})
    shutil.rmtree(home.folder)


def _finds_prompt(chat: ForkedCommand) -> bool:
    """Leave whatever is open by a pause and Ctrl-C until a command runs; raises Wrong.

    False if Ctrl-C has ended the chat while it was loading.
    """
    chat.resize(40, 100)
    chat.kill(signal.SIGWINCH)
    _read_on(chat, 0.3)
    end, tries = time.monotonic() + _SECONDS, 0
    while time.monotonic() < end:  # lines that were typed ahead begin replies, one after the other
        tries += 1
        chat.send("\x03" * (tries % 3))
        _read_on(chat, 0.3)
        if chat.comes_to(f"done{tries}x", 3):
            return True
        if not chat.is_alive and _LOADED not in chat.shown:
            return False
        if not chat.is_alive:
            raise Wrong(f"has ended: {chat.shown[-1500:]!r}")
    raise Wrong(f"dead prompt: {chat.shown[-1500:]!r}")


def _read_on(chat: ForkedCommand, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chat.read(0.05)


def test_random_keys_leave_a_prompt_that_works_and_a_whole_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "own"))
    attack(partial(_session, tmp_path), seconds=60)
