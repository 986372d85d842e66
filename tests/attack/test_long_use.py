"""A month of one user: many starts that end in all ways, many chats, an older version's among them.

`SIRCHAT_ATTACK=3000` starts as often. What was acknowledged is never lost, files stay within their
limits, no process takes more memory than the first ones, and the first chat can still be found.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest

from attacking import MANY, attack
from command_home import CommandHome, Wrong, check_end
from forked_command import ForkedCommand
from native_library import CAN_BUILD, copying_compiler
from sirchat.saved.search import search_sessions
from sirchat.saved.session_list import list_sessions
from sirchat.saved.store import SessionStore
from tool_server import servers_file

_OLD = Path(__file__).parents[1] / "golden" / "saved-chats" / "chats.zip"
_FIRST_SAID = "My pelican is called Quixbert."
_KV_LIMIT = 2**20
_SLACK = 40 * 2**20  # bytes that a start may take more than the first ones
_DAYS = (0, 0, 0, 30, -30, 9000, -9000)  # by which a clock may jump, at each look at it
_DISK = 50 * 2**20  # bytes, where a small disk can be mounted
_TOOLS = ["--tools", "servers.json", "--tools-allow", "snow__weather", "--budget", "900"]
_ENDS = (
    *[signal.SIGKILL] * 3, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, "/exit",
)  # fmt: skip
_WORDS = "the harbour master keeps a green key of every boat that sails to Oslo in May".split()  # noqa: SIM905


class User:
    """One home, and what was acknowledged in it."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.home = CommandHome(
            folder, SIRCHAT_MAX_NEW_TOKENS="3", SIRCHAT_BUDGET="64", SIRCHAT_RECALL="words",
            SIRCHAT_SAVE_KV="on", SIRCHAT_SAVE_KV_LIMIT="1MiB", SIRCHAT_PANEL="off", **variables,
        )  # fmt: skip
        self.home.sessions.mkdir(parents=True)
        with zipfile.ZipFile(_OLD) as files:
            files.extractall(self.home.sessions)
        servers_file(folder / "cwd")
        self.said = [_turn for turns in self.saved().values() for _turn in turns]
        self.most = list[int]()
        self.number = self.lines = 0

    def saved(self) -> dict[str, list[str]]:
        """What the user said in each chat on disk; raises Wrong if one can't be opened."""
        listing, texts = list_sessions(self.home.sessions), dict[str, list[str]]()
        if listing.errors:
            raise Wrong(f"refused: {listing.errors}")
        for entry in listing.sessions:
            with SessionStore.open(entry.path) as store:
                texts[entry.id] = [turn.text for turn in store.turns() if turn.role == "user"]
        return texts

    def start(self, draw: Random) -> None:
        """Open a chat, say something, and end in some way."""
        ids = [entry.id for entry in list_sessions(self.home.sessions).sessions]
        ids = [one for one in ids if "-3pnz" not in one]  # of a model that is no file
        is_new = draw.random() < 0.2 or not self.number
        flags = [] if is_new else ["--resume", draw.choice(["last", *ids]), "--save"]
        flags += _TOOLS * (draw.random() < 0.2)
        ahead = [86_400 * days for days in draw.choices(_DAYS, k=draw.choice((1, 1, 5)))]
        lines = self.lines
        with self.home.run(*flags, in_terminal=True, ahead=ahead) as chat:
            end = time.monotonic() + 60
            while chat.is_alive and not chat.reads_keys and time.monotonic() < end:
                chat.read(0.02)
            for _ in range(draw.choice((0, 1, 1, 2, 4)) or not self.number):
                self._say(draw, chat)
            with (Path("/proc") / str(chat.pid) / "status").open() as status:
                self.most += [1024 * int(line.split()[1]) for line in status if "VmHWM" in line]
            if draw.random() < 0.3:
                chat.send("This may be lost, as it is not answered.\r")
                chat.read(draw.choice((0, 0.01, 0.1)))
            self._end(draw, chat, is_loaded=self.lines > lines)

    def _say(self, draw: Random, chat: ForkedCommand) -> None:
        text = f"{' '.join(draw.choices(_WORDS, k=draw.randint(2, 40)))}, line {self.number}."
        text = text if self.number else _FIRST_SAID
        self.number += 1
        is_full = draw.random() < 0.1
        if is_full:  # the disk, as far as this program can see
            self._limit(chat, 1024)
        chat.send(f"{text}\r")
        if is_full and self._acknowledged(chat):
            self._limit(chat, resource.RLIM_INFINITY)
            chat.send("/save\r")
        if self._acknowledged(chat):
            self.said.append(text)

    def _limit(self, chat: ForkedCommand, size: int) -> None:
        resource.prlimit(chat.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def _acknowledged(self, chat: ForkedCommand) -> bool:
        """Whether the chat comes to a line that is typed now: it has saved all before."""
        self.lines += 1
        if not chat.comes_to(f"done{self.lines}x", 60):
            raise Wrong(f"no answer: {chat.shown[-1500:]!r}")
        return True

    def _end(self, draw: Random, chat: ForkedCommand, *, is_loaded: bool) -> None:
        how = draw.choice(_ENDS)
        if isinstance(how, signal.Signals) and how != signal.SIGINT:
            chat.kill(how)
            check_end(chat, how, {128 + how, -how})
            return
        if how == signal.SIGINT:
            chat.kill(signal.SIGINT)
            while chat.read(0.1):
                pass
        chat.send("\x15/exit\r")
        # While it still loads, Ctrl-C ends it.
        ends_it = how == signal.SIGINT and not is_loaded
        check_end(chat, signal.SIGTERM, {0, 130} if ends_it else {0})

    def check(self) -> None:
        """Nothing that was acknowledged is lost, and nothing takes more room than it may."""
        texts = self.saved()
        on_disk = [text for said in texts.values() for text in said]
        if lost := Counter(self.said) - Counter(on_disk):
            raise Wrong(f"lost: {list(lost)[:5]}, {lost.total()} of {len(self.said)}")
        files = [one for one in self.home.folder.rglob("*") if one.is_file()]
        kv = sum(one.stat().st_size for one in files if one.suffix == ".safetensors")
        if kv > _KV_LIMIT + 2**19:  # a chat that was killed has not made room yet
            raise Wrong(f"keys and values take {kv:,} bytes")
        others = [one for one in files if one.suffix not in (".safetensors", ".sqlite", ".index")]
        others = [one for one in others if one.stat().st_size > 2**20]
        if others or len(list((self.home.folder / "tmp").iterdir())) > 8:
            raise Wrong(f"left behind: {others} {list((self.home.folder / 'tmp').iterdir())}")
        if max(self.most[-10:]) > max(self.most[:10]) + _SLACK:
            raise Wrong(f"memory: {self.most[:10]} at first, {self.most[-10:]} now")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder: for many starts a disk of its own, if there are the rights."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "sirchat-attack", str(folder)]
    is_mounted = (
        bool(MANY) and os.geteuid() == 0 and not subprocess.run(mount, check=False).returncode
    )
    yield folder
    if is_mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_month_of_starts_loses_nothing_and_fills_neither_disk_nor_memory(
    tmp_path: Path, disk: Path
) -> None:
    compiles = {"CXX": str(copying_compiler(tmp_path / "bin"))} if CAN_BUILD else {}
    compiles["SIRCHAT_COMPILE"] = "auto" if CAN_BUILD and MANY else "off"
    user, starts = User(disk / "home", **compiles), count()

    def start(draw: Random) -> None:
        user.start(draw)
        if next(starts) % 100 == 0:
            user.check()

    attack(start, few=2, seconds=60)
    user.check()
    best, *_ = search_sessions(user.home.sessions, "pelican called").hits
    assert _FIRST_SAID in "".join(part.text for part in best.snippet)
