"""Random environment variables: a command runs, or refuses them in one line."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from attacking import attack, odd_text, refuse_odd_display
from command import run
from sirchat.config.profile import Profile

_OTHERS = [
    "HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TERM", "COLUMNS", "LINES",
    "LANG", "LC_ALL", "EDITOR", "VISUAL", "PAGER", "NO_COLOR", "FORCE_COLOR", "COLORFGBG",
    "COLORTERM", "HF_HOME", "HF_HUB_CACHE", "SIRCHAT_PROFILE", "SIRCHAT_DEBUGGER",
    "SIRCHAT_HOME", "TMPDIR", "TZ", "OMP_NUM_THREADS", "PATH", "USER", "PYTHONSAFEPATH", "SHELL",
]  # fmt: skip
_VALUES = [
    "/", ".", "..", "~", "~nouser", "~nouser/x", "/dev/null", "/dev/zero", "/proc/self/mem", "-1",
    "0", "1", "80", "999999999999", "on", "xterm", "dumb", "C", "C.UTF-8", "xx_XX.bogus",
    "a" * 300, "/" + "a/" * 3000, "\udcff\udcfe", "tiny", "sink", "cpu", "UTC", "'", '"', "x;rm",
]  # fmt: skip
_COMMANDS = [
    ("policies",), ("profiles", "list"), ("profiles", "show", "default"), ("sessions", "list"),
    ("sessions", "show", "last"), ("paths",), ("models",), ("--help",), ("--help-settings",),
    ("sessions", "rm", "x"), ("ask", ""),
]  # fmt: skip


def test_an_error_does_not_repeat_a_path_of_thousands_of_letters() -> None:
    done = run("sessions", "list", SIRCHAT_HOME="/" + "a/" * 3000)
    assert done.returncode == 1
    assert len(done.stderr) < 500


@pytest.mark.slow
def test_every_variable_is_used_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr("sirchat.models.listing.PACKAGED", ())
    names = [*_OTHERS, *(f"SIRCHAT_{name.upper()}" for name in Profile.model_fields)]

    def start(random: Random) -> None:
        given = {"SIRCHAT_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
        for name in random.choices(names, k=random.randint(1, 3)):
            value = random.choice(_VALUES) if random.random() < 0.6 else odd_text(random, 1)
            value = value.replace("\0", "").encode("utf-8", "replace").decode("utf-8", "replace")
            if random.random() < 0.1:
                value += "\udcff"  # a byte that is no UTF-8
            given[name] = value
        with patch.dict(os.environ):
            done = run(*random.choice(_COMMANDS), **given)
        told = done.stderr.strip()
        if done.returncode not in (0, 1, 2) or "--debug shows" in told or "Traceback" in told:
            raise ValueError(f"{done.returncode}: {told[-300:]}")
        if done.returncode and (len(told.splitlines()) != 1 or len(told) > 2000):
            raise ValueError(
                f"{len(told.splitlines())} lines, {len(told)} characters: {told[:300]}"
            )
        refuse_odd_display(done.stdout.replace("\x1b", "") + told.replace("\x1b", ""))

    attack(start, 40)
