"""Starts in a damaged home with random flags: each does its work, or says in one line why not.

`SIRCHAT_ATTACK=500` starts as often.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from attacking import attack, mutated, odd_text, refuse_odd_display
from chatting import tiny
from command_home import CommandHome
from random_encoders import random_encoder
from saved_chats import saved
from sirchat.config.profile import Profile
from sirchat.config.values import format_setting
from sirchat.paths import encoder_attempts_file, encoder_files, history_file, user_profiles_dir
from sirchat.version import __version__

_SECONDS = 8.0  # of processor time
_COMMANDS = [
    ["ask", "Hello"], ["ask", "Hello"], ["ask", "--resume", "trip", "Hello"], [], ["--json"],
    ["--resume", "last"], ["sessions"], ["sessions", "search", "words"], ["sessions", "map", "a"],
    ["sessions", "export", "trip", "-"], ["doctor"], ["paths"], ["profiles", "list"], ["models"],
    ["profiles", "show", "mine"], ["--profile", "mine"], ["--show"],
]  # fmt: skip


def fill(home: Path, patch: pytest.MonkeyPatch) -> None:
    """Write all that sirchat keeps for a user."""
    patch.setenv("SIRCHAT_HOME", str(home))
    saved(home / "data" / "sessions", "trip", model=tiny(), save_kv="on")
    random_encoder(tiny(), (1,), 8).save(encoder_files("tiny")[0])
    attempts = {encoder_attempts_file("tiny"): f"{__version__}\nstart\n", history_file(): "+a\n"}
    attempts[user_profiles_dir() / "mine.yaml"] = "budget: 256\npolicy: sink\n"
    attempts[user_profiles_dir() / "default.yaml"] = "temperature: 0.5\n"
    for file, text in attempts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in ("state/prepared/a.safetensors", "state/compiled/step-0.so", "data/archives/x/y"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"x" * 100)


def damage(random: Random, home: Path) -> str:
    """Change, remove or replace one of the files or folders; returns which, and how."""
    place = random.choice(sorted(one for one in home.rglob("*") if one.name not in ("tmp", "cwd")))
    kinds = ["remove", "folder", "pipe", "link to itself", "link to nothing", "no rights", "empty"]
    kind = random.choice([*kinds, *["change"] * 4 * place.is_file()])
    if kind == "change" and place.is_file():
        place.write_bytes(mutated(random, place.read_bytes()))
        return f"{kind} {place.relative_to(home)}"
    if kind == "no rights" and place.exists():
        place.chmod(random.choice((0, 0o200, 0o400, 0o500)))
        return f"{kind} {place.relative_to(home)}"
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind.startswith("link"):
        place.symlink_to(place if kind == "link to itself" else "/nowhere")
    elif kind == "empty":
        place.touch()
    return f"{kind} {place.relative_to(home)}"


def flags(random: Random) -> list[str]:
    """Flags of settings, with values that they have or may not have."""
    found = list[str]()
    for _ in range(random.choice((0, 0, 1, 2))):
        name = random.choice(list(Profile.model_fields))
        value = format_setting(getattr(Profile(), name))
        if random.random() < 0.5:
            value = odd_text(random, 1).encode(errors="replace").decode().replace("\0", "0")[:60]
        if name not in ("model", "device", "compile", "system_file"):
            found.append(f"--{name.replace('_', '-')}={value}")
    return found


def test_a_start_in_a_damaged_home_does_its_work_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, number = tmp_path / "whole", 0
    fill(whole, monkeypatch)

    def start(random: Random) -> None:
        nonlocal number
        number += 1
        home = CommandHome(tmp_path / str(number), SIRCHAT_MAX_NEW_TOKENS="4")
        shutil.copytree(whole, home.folder, dirs_exist_ok=True)
        did = [damage(random, home.folder) for _ in range(random.choice((1, 1, 2, 3)))]
        words = list(random.choice(_COMMANDS))
        if words[:1] in ([], ["ask"], ["--json"], ["--resume"], ["--show"]):
            words += flags(random)
        try:
            with home.run(*words, in_terminal=False) as command:
                command.send("Hello there.\n")
                command.close_input()
                code = command.ended(_SECONDS)
                said = (command.shown + command.errors).decode(errors="replace")
        finally:
            for place in home.folder.rglob("*"):
                with suppress(OSError):
                    place.chmod(0o700)
            shutil.rmtree(home.folder)
        about = f"{did}, {words}: code {code}"
        if code not in (0, 1, 2) or "Traceback" in said or "Error:" in said:
            raise ValueError(f"{about}: {said[-300:]!r}")
        refuse_odd_display(said)
        if code and "sirchat: " not in said and words != ["doctor"]:  # which tells it in a list
            raise ValueError(f"{about} without a reason: {said[-300:]!r}")

    attack(start, few=2, seconds=60)
