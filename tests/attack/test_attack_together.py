"""Several programs on the same files, one of them killed: the others go on, nothing is lost.

`SIRCHAT_ATTACK=300` races so many times: on one chat, one history, one download, one home at its
first use, with archives on disk.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from attacking import MANY, attack
from chatting import tiny
from command_home import CommandHome, Wrong
from fake_hub import FakeHub, fake_hub
from saved_chats import saved
from sirchat.paths import tiny_model_dir
from sirchat.ui.typed_input import open_history

SECONDS = 20.0  # most processor time of a program
_MOST = 8 if MANY else 3  # programs at the same time
_IN_USE = re.compile(rb"in use by another process \(close")
_LARGE = Random(0).randbytes(9 * 2**20)
_FILES = {
    "config.json": (tiny_model_dir() / "config.json").read_bytes(),
    "model.safetensors": _LARGE,
}


class Race(CommandHome):
    """Programs that run at the same time in one home; one of them may be killed.

    Attributes:
        done: exit code, or -signal, of each program, in order.
        victim: the index of the killed program; None if none was.
    """

    def __init__(self, draw: Random, home: Path, hub: FakeHub) -> None:
        super().__init__(
            home, SIRCHAT_MAX_NEW_TOKENS="12", HF_HUB_CACHE=str(home / "hub"),
            HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0",
        )  # fmt: skip
        self._draw = draw
        self.done: list[int] = []
        self.victim: int | None = None
        self.told: list[bytes] = []

    def race(self, commands: Sequence[Sequence[str]], typed: Sequence[str] = ()) -> None:
        """Start all, kill one at a random moment, and wait for the end of all.

        `typed`: what is typed in the terminal of each; without it, they run between pipes.
        """
        with ExitStack() as stack:
            programs = [
                stack.enter_context(self.run(*one, in_terminal=bool(typed))) for one in commands
            ]
            if not typed:
                for program in programs:
                    program.close_input()
            for program, text in zip(programs, typed, strict=False):
                program.send(text)
            self.victim = self._draw.choice([None, *range(len(programs))])
            until = time.monotonic() + self._draw.random() ** 2 * 2
            while time.monotonic() < until:
                for program in programs:
                    program.read(0.005)
            if self.victim is not None:
                programs[self.victim].kill(signal.SIGKILL)
            for command, program in zip(commands, programs, strict=True):
                code, said = program.ended(SECONDS), program.shown + program.errors
                if code is None or b"Traceback" in said or b"Error:" in said:
                    raise Wrong(f"{command}, {code}: {said[-3000:].decode(errors='replace')}")
                self.done.append(code)
                self.told.append(said)

    def pull(self) -> subprocess.Popen[bytes]:
        """Start a download; the library that does it reads the hub's address as it is imported."""
        command = [sys.executable, "-m", "sirchat", "models", "pull", "me/small"]
        env = self.environ | {"HF_HUB_DOWNLOAD_TIMEOUT": "60"}
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def survivors(self) -> list[int]:
        """The indices of the programs that were not killed."""
        return [number for number in range(len(self.done)) if number != self.victim]

    def said(self) -> list[str]:
        """What users said in all chats, each of which is checked."""
        turns = self.turns(is_killed=self.victim is not None)
        return [turn.text for turn in turns if turn.role == "user"]


def one_chat(draw: Random, race: Race) -> None:
    """Questions to one saved chat: each is answered and kept, or refused, and says by whom."""
    saved(race.sessions, "trip", model=tiny(), save_kv=draw.choice(["on", "off"]))
    before = race.said()
    questions = [f"question {number}" for number in range(draw.randint(2, _MOST))]
    race.race([("ask", "--resume", "trip", one) for one in questions])
    said = race.said()
    if said[: len(before)] != before:
        raise Wrong(f"{before} became {said}")
    for number in race.survivors():
        count, code = said.count(questions[number]), race.done[number]
        is_refused = code == 1 and _IN_USE.search(race.told[number])
        if not (code == 0 and count == 1) and not (is_refused and count == 0):
            raise Wrong(f"exit code {code}, {count} times there: {race.told[number]!r}")


def first_use(draw: Random, race: Race) -> None:
    """All kinds of commands in a home that is not there yet."""
    talk = race.folder / "talk.txt"
    talk.write_text("".join(f"USER: {'some words ' * 20}{n}\n" for n in range(12)))
    archive = ("--archive", "disk", "--budget", "96")
    kinds = [("replay", str(talk), *archive), ("sessions",), ("models",), ("profiles", "init", "x"),
             ("ask", "Hello"), ("sessions", "search", "words"), ("paths",)]  # fmt: skip
    race.race([draw.choice(kinds) for _ in range(draw.randint(2, _MOST))])
    for number in race.survivors():
        if race.done[number] not in (0, 1, 2):
            raise Wrong(f"exit code {race.done[number]}: {race.told[number]!r}")
    race.said()


def chats(draw: Random, race: Race) -> None:
    """Chats in terminals: what was said is saved, and what was typed is in the one history."""
    count = draw.randint(2, min(5, _MOST))
    lines = [[f"line {n} of chat {chat}" for n in range(2)] for chat in range(count)]
    typed = ["".join(f"{one}\r" for one in own) + "/exit\r" for own in lines]
    flags = ("--archive", "disk", "--budget", "96", "--panel", "off")
    race.race([flags] * count, typed)
    said = race.said()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIRCHAT_HOME", str(race.folder))
        kept = open_history(lambda complaint: None).lines()
    for number in race.survivors():
        if race.done[number] or not {*lines[number]} <= {*said} & {*kept}:
            raise Wrong(f"{lines[number]} were said, {said} saved, {kept} in the history")


def download(draw: Random, race: Race) -> None:
    """One download: one program does it, the others do, too, or say that it is under way."""
    for count in (draw.randint(2, _MOST), *[1] * 5):  # a busy machine may answer too late
        pulls = [race.pull() for _ in range(count)]
        victim = None if count == 1 else draw.randrange(count)
        if victim is not None:
            time.sleep(draw.random() ** 2 * 3)
            pulls[victim].kill()
            race.victim = victim
        for number, one in enumerate(pulls):
            told = one.communicate(timeout=300)[1]
            busy = b"can't be reached" in told
            if number != victim and one.returncode != 0 and not (one.returncode == 1 and busy):
                raise Wrong(f"exit code {one.returncode}: {told!r}")
            race.done.append(one.returncode)
        if count == 1 and race.done[-1] == 0:
            break
    for snapshot in (race.folder / "hub" / "models--me--small" / "snapshots").iterdir():
        if (snapshot / "model.safetensors").read_bytes() != _LARGE:
            raise Wrong("the download is damaged")


SCENES = (one_chat, one_chat, first_use, chats, download)


def test_programs_that_share_their_files_lose_nothing_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub({"me/small": _FILES}) as hub:

        def run(draw: Random) -> None:
            scene = draw.choice(SCENES) if MANY else one_chat
            home = Path(tempfile.mkdtemp(dir=tmp_path))
            monkeypatch.setenv("SIRCHAT_HOME", str(home))
            scene(draw, Race(draw, home, hub))
            shutil.rmtree(home)

        attack(run, seconds=60)
