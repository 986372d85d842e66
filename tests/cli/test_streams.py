"""Standard streams that are closed, full, or of a locale that lacks what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from warm_python import warm_python

pytestmark = pytest.mark.slow


def shell(tmp_path: Path, line: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in bash, where `$SIRCHAT` is the program, and `$COLD` a slow start of it."""
    program, cold = (" ".join([*one, "-m", "sirchat"]) for one in (warm_python(), [sys.executable]))
    given = os.environ | {"SIRCHAT_HOME": str(tmp_path), "SIRCHAT": program, "COLD": cold}
    return subprocess.run(
        ["bash", "-c", line], env=given | environ, capture_output=True, check=False, timeout=120
    )


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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "line", ["$COLD policies", "$SIRCHAT --help-settings", "$SIRCHAT ask 'Say é → 你'"]
)
def test_any_locale_will_do(tmp_path: Path, line: str, encoding: str) -> None:
    done = shell(tmp_path, line, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding)
