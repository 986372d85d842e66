"""Signals at random moments, in terminals and pipes: nothing finished is lost, all is tidied up.

`SIRCHAT_ATTACK=500` runs so many commands. The moment is so many pieces of output after the last
line that was typed, and some milliseconds: a busy machine changes little about it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

from attacking import attack
from chatting import tiny
from command_home import CommandHome, Wrong, check_end
from forked_command import ForkedCommand
from saved_chats import saved
from sirchat.saved.session_list import list_sessions

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
_COMMANDS = ("/policy sink", "/stats", "/panel", "/budget 200", "/evicted", "/why last", "/nosuch")
_FLAGS = (
    (),
    ("--archive", "disk", "--budget", "96"),
    ("--recall", "on", "--budget", "160"),
    ("--no-markdown", "--panel", "off"),
)
_STATUS = re.compile(rb"tok/s, (?:[\d,]+ evicted|cache holds)")


def check(home: CommandHome, finished: list[str], replies: int, *, is_killed: bool) -> None:
    """These messages and so many replies are saved, the messages first."""
    turns = home.turns(is_killed=is_killed)
    said = [turn.text for turn in turns if turn.role == "user"]
    told = sum(turn.role == "assistant" for turn in turns)
    if said[: len(finished)] != finished or told < replies:
        raise Wrong(f"lost: {finished} and {replies} replies were done, {said} {told} saved")


class Attack:
    """Signals to commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved = folder / "saved"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SIRCHAT_HOME", str(self._saved))
            saved(self._saved / "data" / "sessions", "old", model=tiny())
        self._talk = folder / "talk.txt"
        self._talk.write_text("".join(f"USER: words {n}\n" for n in range(60)))

    def run(self, draw: Random) -> None:
        """One command and its signals; raises Wrong."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        home = CommandHome(folder, SIRCHAT_MAX_NEW_TOKENS="24")
        act = draw.choice([self._chat] * 4 + [self._lines] * 2 + [self._other] * 2)
        act(draw, home, draw.choice(_SIGNALS))
        shutil.rmtree(home.folder)

    def _chat(self, draw: Random, home: CommandHome, number: signal.Signals) -> None:
        with home.run(*draw.choice(_FLAGS), in_terminal=True) as chat:
            finished, said = list[str](), list[str]()
            for n in range(_lines_to_type(draw, chat)):
                if draw.random() < 0.5:
                    said.append(f"message {n} of a few words")
                    chat.send(said[-1] + "\r")
                else:
                    chat.send(draw.choice(_COMMANDS) + "\r")
                if number == signal.SIGINT and draw.random() < 0.4:
                    _wait_a_moment(draw, chat)
                    self._send(chat, number, draw)
                if draw.random() < 0.5 and chat.comes_to(f"done{n}x", 20):
                    finished = said.copy()
            _wait_a_moment(draw, chat)
            replies = len(_STATUS.findall(chat.shown)) if number != signal.SIGKILL else 0
            self._send(chat, number, draw)
            codes = {128 + number, -number} if not chat.shown else {128 + number}
            if number == signal.SIGINT and chat.is_alive:
                while chat.read(0.05):
                    pass
                chat.send("\x04")
                codes |= {0}
            check_end(chat, number, codes)
        if number == signal.SIGINT:  # which stops replies, and may come before a message is read
            finished = []
        check(home, finished, replies, is_killed=number == signal.SIGKILL)

    def _lines(self, draw: Random, home: CommandHome, number: signal.Signals) -> None:
        """A chat between pipes, or a replay; with --json every line is whole."""
        as_json = draw.random() < 0.5
        typed = draw.random() < 0.5
        flags = [*draw.choice(_FLAGS[:3]), *["--json"] * as_json]
        arguments = flags if typed else ["replay", str(self._talk), *flags]
        in_terminal = not typed and draw.random() < 0.4
        with home.run(*arguments, in_terminal=in_terminal) as command:
            if typed:
                command.send("".join(f"words {n}\n" for n in range(draw.randrange(60))))
                if draw.random() < 0.5:
                    command.close_input()
            _wait_a_moment(draw, command)
            self._send(command, number, draw)
            check_end(
                command, number, {128 + number, 0} | ({-number} if not command.shown else set())
            )
            if as_json and number != signal.SIGKILL:
                shown = command.shown.decode().splitlines()
                for line in (one for one in shown if not in_terminal or one.startswith("{")):
                    json.loads(line)
        check(home, [], 0, is_killed=number == signal.SIGKILL)

    def _other(self, draw: Random, home: CommandHome, number: signal.Signals) -> None:
        """Commands that end of themselves; a saved chat keeps what it had."""
        shutil.copytree(self._saved / "data", home.folder / "data")
        arguments = draw.choice([
            ("ask", "Hello"), ("ask", "--resume", "old", "Hello"), ("--resume", "old"),
            ("sessions", "list"), ("sessions", "export", "old"), ("tutorial",),
            ("eval", "dailydialog", "--limit", "3", "--policies", "sink", "--out", "results"),
            ("eval", "dailydialog", "--limit", "3", "--policies", "sink"),
            ("compare", str(self._talk), "--policies", "sink,entropy"), ("doctor",), ("models",),
        ])  # fmt: skip
        in_terminal = draw.random() < 0.5 or arguments[0] in ("--resume", "tutorial")
        with home.run(*arguments, in_terminal=in_terminal) as command:
            if not in_terminal:
                command.close_input()
            if arguments[0] in ("--resume", "tutorial"):
                command.send("\r" * _lines_to_type(draw, command))
            _wait_a_moment(draw, command)
            self._send(command, number, draw)
            codes = {128 + number, 0, 1}  # 1: what it was asked for cannot be done
            if not command.shown:
                codes |= {-number}
            if number == signal.SIGINT and arguments[0] in ("--resume", "tutorial"):
                while command.read(0.05):
                    pass
                command.send("\x04" * 3)
            check_end(command, number, codes)
        (old,) = list_sessions(home.folder / "data" / "sessions").sessions
        if old.turns < 4:
            raise Wrong(f"{old.turns} turns are left of 4")
        check(home, [], 0, is_killed=number == signal.SIGKILL)

    def _send(self, command: ForkedCommand, number: signal.Signals, draw: Random) -> None:
        if number == signal.SIGINT and command.is_in_terminal and draw.random() < 0.3:
            command.send("\x03")
        else:
            command.kill(number)


def _lines_to_type(draw: Random, chat: ForkedCommand) -> int:
    """How many; none while the chat loads, or it is waited for."""
    number = draw.choice((0, draw.randrange(12)))
    end = time.monotonic() + 20
    while number and not chat.reads_keys and chat.is_alive and time.monotonic() < end:
        chat.read(0.02)
    return number


def _wait_a_moment(draw: Random, command: ForkedCommand) -> None:
    """Until some output has come, and for some milliseconds."""
    end = time.monotonic() + 2
    for _ in range(draw.choice((0, 1, 5, 20, 60))):
        while not command.read(0.05) and command.is_alive and time.monotonic() < end:
            pass
    time.sleep(draw.choice((0, 0.002, 0.05, 0.3)) * draw.random())


def test_a_signal_at_any_moment_loses_nothing_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "own"))
    attack(Attack(tmp_path).run, few=2, seconds=60)
