"""Slow streams, and limits: the right exit code, one line, never a hang.

One of the cases by default, all with `SIRCHAT_ATTACK`: each starts a program. (An input that is a
folder is refused by Python, before any of sirchat's code.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attacking import MANY
from sirchat.saved.session_list import list_sessions
from terminal import Terminal

pytestmark = pytest.mark.slow

_SLOW_READER = (
    f'{sys.executable} -c "import os, time\nwhile os.read(0, 1): time.sleep(0.0005)" > /dev/null'
)
CASES = {
    "output is a slow reader": (f"$SIRCHAT --quiet replay talk.txt | {_SLOW_READER}", {0}),
    "json to a slow reader": (f"$SIRCHAT --json < talk.txt | {_SLOW_READER}", {0}),
    "a slow writer": ("(echo one; sleep 1; echo two; sleep 1) | $SIRCHAT --quiet", {0}),
    "too little memory to load": ("ulimit -v 700000; $SIRCHAT ask Hello", {1}),
    "little memory": ("ulimit -v 1500000; $SIRCHAT ask Hello", {0, 1}),
    "memory that ends": ("ulimit -v 2500000; $SIRCHAT ask Hello --budget 1900000000", {0, 1, 2}),
    "small files": ("ulimit -f 8; $SIRCHAT replay talk.txt --archive disk --budget 96", {0, 1}),
    "no files": ("ulimit -f 0; $SIRCHAT ask Hello > /dev/null", {0, 1}),
    "an export to a small file": ("ulimit -f 0; $SIRCHAT ask Hello > out.txt", {1}),
    **{f"{n} open files": (f"ulimit -n {n}; $SIRCHAT ask Hello", {0, 1}) for n in (5, 8, 12, 20)},
    **{f"{n} open files, an archive": (
        f"ulimit -n {n}; $SIRCHAT replay talk.txt --archive disk", {0, 1}) for n in (10, 16, 24)},
}  # fmt: skip
_FEW = ("12 open files",)
# Limits of a chat, and whether it can be saved under them.
LIMITED_CHATS = {"-f 8": False, "-f 20": False, "-n 9": True, "-n 12": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "talk.txt").write_text("".join(f"USER: words {n}, é 你\n" for n in range(9)))
    return tmp_path


def shell(folder: Path, line: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in bash, where `$SIRCHAT` is the program; it fails if any part does."""
    given = os.environ | {
        "SIRCHAT_HOME": str(folder / "home"), "SIRCHAT": f"{sys.executable} -m sirchat",
        "SIRCHAT_MAX_NEW_TOKENS": "8",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder, env=given | environ, capture_output=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES if MANY else _FEW)
def test_odd_streams_and_limits_end_in_one_line_at_most(folder: Path, name: str) -> None:
    line, codes = CASES[name]
    done = shell(folder, line)
    told = done.stderr.decode(errors="replace")
    assert "Traceback" not in told, told
    assert "Exception ignored" not in told, told
    assert done.returncode in codes, (done.returncode, told)
    if done.returncode == 1 and done.stderr:
        assert len(told.strip().splitlines()[-1]) < 500
        assert told.strip().splitlines()[-1].startswith("sirchat: "), told


@pytest.mark.parametrize("limit", LIMITED_CHATS if MANY else ("-f 20",))
def test_a_chat_goes_on_under_a_limit_and_says_if_it_is_not_saved(
    tmp_path: Path, limit: str
) -> None:
    line = f"ulimit {limit}; exec {sys.executable} -m sirchat --max-new-tokens 8"
    with Terminal("bash", "-c", line, home=tmp_path) as chat:
        chat.ask("My name is Anna.")
        chat.ask("I live in Rome.")
        assert "4 messages" in chat.ask("/stats")
        assert chat.leave() == 0
        is_saved = LIMITED_CHATS[limit]
        assert ("the chat is not saved now" in chat.text) is not is_saved
        assert ("to continue this chat" in chat.text) is is_saved
    listing = list_sessions(tmp_path / "data" / "sessions")
    assert [entry.turns for entry in listing.sessions if entry.turns] == [4] * is_saved
