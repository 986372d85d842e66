"""A chat works, and `--help` names only what is there, where `sirchat/lab` is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import sirchat

CHAT_AND_DOCTOR = """
import sys
from sirchat.cli import main

for arguments in (["--max-new-tokens", "3"], ["doctor"]):
    sys.argv = ["sirchat", *arguments]
    try:
        main()
    except SystemExit as leaving:
        print("ended with", leaving.code, flush=True)
"""
"""One process for both: the imports take most of the time."""


def test_a_chat_works_without_the_laboratory(tmp_path: Path) -> None:
    package = Path(sirchat.__file__).parent
    unwanted = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(package, tmp_path / "sirchat", ignore=unwanted)
    if not (package / "profiles").is_dir():  # in a clone they are beside the package
        shutil.copytree(package.parent / "profiles", tmp_path / "profiles")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SIRCHAT_HOME": str(tmp_path / "home")}

    both = tmp_path / "both.py"
    both.write_text(CHAT_AND_DOCTOR, encoding="utf-8")

    def run(*command: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            input=typed,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )

    overview = run("-m", "sirchat", "--help").stdout
    assert "  sessions " in overview
    assert "  bench " not in overview
    assert 'there is no command "train"' in run("-m", "sirchat", "train").stderr
    done = run(str(both), typed="My name is Anna.")
    chat, *after = done.stdout.split("ended with ")
    assert [one[0] for one in after] == ["0", "0"], done.stderr
    assert chat.strip()
