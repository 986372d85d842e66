"""Standard streams that are closed, full, slow, or of a locale that lacks what is printed; limits.

Of the slow ones and the limits one is tried, all with `SIRCHAT_ATTACK`: each starts a program.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from attacking import MANY
from sirchat.saved.session_list import list_sessions
from terminal import Terminal
from warm_python import warm_python


def shell(tmp_path: Path, line: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in bash, where `$SIRCHAT` is the program, and `$COLD` a slow start of it."""
    program, cold = (" ".join([*one, "-m", "sirchat"]) for one in (warm_python(), [sys.executable]))
    given = os.environ | {"SIRCHAT_HOME": str(tmp_path), "SIRCHAT": program, "COLD": cold}
    return subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path, env=given | environ, capture_output=True, check=False, timeout=120,
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[bytes]) -> str:
    told = done.stderr.decode()
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) == 1
    assert told.startswith("sirchat: ")
    return told


@pytest.mark.parametrize("command", ["ask Hello", "--help", "policies", "--json <<< Hello"])
def test_a_closed_output_is_an_error_in_one_line(tmp_path: Path, command: str) -> None:
    done = shell(tmp_path, f"$SIRCHAT {command} >&-")
    assert done.returncode == 1
    assert "standard output is closed" in one_line(done)
    assert shell(tmp_path, f"$SIRCHAT {command} >&- 2>&-").returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["ask -m tiny Hello", "--help", "policies", "--json <<< Hello"])
def test_a_full_disk_is_an_error_in_one_line(tmp_path: Path, command: str) -> None:
    done = shell(tmp_path, f"$SIRCHAT {command} > /dev/full")
    assert done.returncode == 1
    assert "No space left" in one_line(done)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_told_still_has_its_exit_code(tmp_path: Path) -> None:
    assert shell(tmp_path, "$SIRCHAT --policy nonsense 2> /dev/full").returncode == 2


def test_without_input_and_errors_it_still_answers(tmp_path: Path) -> None:
    done = shell(tmp_path, "$SIRCHAT ask Hello <&- 2>&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()


def test_a_reader_that_leaves_ends_it(tmp_path: Path) -> None:
    done = shell(tmp_path, "for n in 1 2 3 4 5 6; do echo Hello; done | $SIRCHAT --json | head -1")
    assert json.loads(done.stdout)["event"] == "session"
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("line", "encoding"),
    [
        ("$SIRCHAT --help-settings", "ascii"),
        ("$SIRCHAT ask 'Say é → 你'", "ascii"),
        ("$SIRCHAT ask 'Say é → 你'", "latin-1"),
    ],
)
def test_any_locale_will_do(tmp_path: Path, line: str, encoding: str) -> None:
    done = shell(tmp_path, line, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding)


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
# Limits of a chat, in bytes of a file or open files, and whether it can be saved under them.
LIMITED_CHATS = {
    (resource.RLIMIT_FSIZE, 2**12): False,
    (resource.RLIMIT_FSIZE, 20 * 2**10): False,
    (resource.RLIMIT_NOFILE, 24): True,
}


@pytest.mark.parametrize("name", CASES if MANY else _FEW)
def test_odd_streams_and_limits_end_in_one_line_at_most(tmp_path: Path, name: str) -> None:
    line, codes = CASES[name]
    (tmp_path / "talk.txt").write_text("".join(f"USER: words {n}, é 你\n" for n in range(9)))
    line = line.replace("$SIRCHAT", "$COLD")  # a start of its own has the limits from its beginning
    done = shell(tmp_path, line, SIRCHAT_MAX_NEW_TOKENS="8")
    told = done.stderr.decode(errors="replace")
    assert "Traceback" not in told, told
    assert "Exception ignored" not in told, told
    assert done.returncode in codes, (done.returncode, told)
    if done.returncode == 1 and done.stderr:
        assert len(told.strip().splitlines()[-1]) < 500
        assert told.strip().splitlines()[-1].startswith("sirchat: "), told


@pytest.mark.parametrize("limit", LIMITED_CHATS if MANY else [(resource.RLIMIT_FSIZE, 20 * 2**10)])
def test_a_chat_goes_on_under_a_limit_and_says_if_it_is_not_saved(
    tmp_path: Path, limit: tuple[int, int]
) -> None:
    with Terminal("--max-new-tokens", "8", home=tmp_path) as chat:
        resource.prlimit(chat.child.pid, limit[0], (limit[1], resource.RLIM_INFINITY))
        chat.ask("My name is Anna.")
        chat.ask("I live in Rome.")
        assert "4 messages" in chat.ask("/stats")
        assert chat.leave() == 0
        is_saved = LIMITED_CHATS[limit]
        assert ("the chat is not saved now" in chat.text) is not is_saved
        assert ("to continue this chat" in chat.text) is is_saved
    listing = list_sessions(tmp_path / "data" / "sessions")
    assert [entry.turns for entry in listing.sessions if entry.turns] == [4] * is_saved
