"""A chat works, and `--help` names only what is there, where `sirchat/lab` is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sirchat


@pytest.mark.slow
def test_a_chat_works_without_the_laboratory(tmp_path: Path) -> None:
    package = Path(sirchat.__file__).parent
    unwanted = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(package, tmp_path / "sirchat", ignore=unwanted)
    if not (package / "profiles").is_dir():  # in a clone they are beside the package
        shutil.copytree(package.parent / "profiles", tmp_path / "profiles")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SIRCHAT_HOME": str(tmp_path / "home")}

    def run(*command: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sirchat", *command],
            input=typed,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )

    overview = run("--help").stdout
    assert "  sessions " in overview
    assert "  bench " not in overview
    assert 'there is no command "train"' in run("train").stderr
    chat = run("--max-new-tokens", "3", typed="My name is Anna.")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    assert run("doctor").returncode == 0
