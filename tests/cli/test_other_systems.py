"""The main job as if on Windows: with what the standard library lacks there hidden from sirchat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import as_on_windows
from chatting import tiny
from command import Done, run
from gguf_file import write_gguf
from warm_python import warm_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TALK = "My name is Anna.\nI live in Rome, and I have a red bicycle.\nWhat is my name?\n"
JOKE = "Tell me a joke."
_PROGRAM = str(as_on_windows.__file__)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")
    return tmp_path


def on_windows(*arguments: str, text: str = "", **variables: str) -> Done:
    """What `sirchat ARGUMENTS` does as if on Windows."""
    done = subprocess.run(
        [*warm_python(), _PROGRAM, *arguments],
        input=text,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", **variables},
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_gguf_file_chats_evicts_and_recalls(home: Path) -> None:
    pytest.importorskip("gguf")
    file = write_gguf(home / "a.gguf", tiny(), "Q4_0")
    flags = ("--model", str(file), "--budget", "32", "--recent", "8", "--archive", "disk")
    found = on_windows(*flags, text=TALK)
    assert found.stdout == run(*flags, text=TALK).stdout
    assert found.returncode == 0
    assert found.stdout.count("ASSISTANT: ") == 3
    assert "evicted" in found.stderr


def test_models_are_listed() -> None:
    found = on_windows("models")
    assert found.stdout == run("models", COLUMNS="200").stdout
    assert "tiny" in found.stdout
