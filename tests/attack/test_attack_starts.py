"""Starts in a damaged home with random flags: each does its work, or says in one line why not.

`SIRCHAT_ATTACK=500` starts as often.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from attacking import attack, harm, odd_text, refuse_odd_display
from chatting import hub_tokenizer, tiny
from command_home import CommandHome
from forked_command import ForkedCommand
from native_library import CAN_BUILD, copying_compiler
from random_encoders import random_encoder
from saved_chats import saved
from sirchat.config.profile import Profile
from sirchat.config.values import format_setting
from sirchat.paths import encoder_attempts_file, encoder_files, history_file, user_profiles_dir
from sirchat.version import __version__
from tool_server import servers_file

_SECONDS = 8.0  # of processor time
_TOOLS = ["--tools", "servers.json", "--tools-allow", "snow__weather"]
_WITHOUT_A_CHAT = [
    ["sessions"], ["sessions", "search", "words"], ["sessions", "map", "a"], ["--help"],
    ["sessions", "export", "trip", "-"], ["doctor"], ["paths"], ["profiles", "list"], ["models"],
    ["profiles", "show", "mine"], ["policies"], ["--show"],
]  # fmt: skip
_CHATS = [
    ["ask", "Hello"], ["ask", "--resume", "trip", "Hello"], [], ["--json"], ["--resume", "last"],
    ["--profile", "mine"], ["ask", *_TOOLS, "How is it in Rome?"], _TOOLS, ["-c", *_TOOLS],
    ["--archive", "disk", "--budget", "128"],
]  # fmt: skip
_LEARNS = ["ask", "--model", "deep", "Hello"]  # starts to learn an encoder
_LINES = [
    "Hello there.",
    "My name is Anna.",
    "/tools on snow",
    "/undo",
    "/pin Anna",
    "",
    "/nothing",
]
_JUMPS = (0, 3600, -3600, 86_400 * 400, -86_400 * 400, 1)  # of the clock, in seconds
_MOUNTS = os.geteuid() == 0 and shutil.which("mount") is not None


def fill(home: Path, patch: pytest.MonkeyPatch) -> None:
    """Write all that sirchat keeps for a user, with machine code, if it can be had."""
    patch.setenv("SIRCHAT_HOME", str(home / "home"))
    saved(home / "home" / "data" / "sessions", "trip", model=tiny(), save_kv="on")
    random_encoder(tiny(), (1,), 8).save(encoder_files("tiny")[0])
    attempts = {encoder_attempts_file("tiny"): f"{__version__}\nstart\n", history_file(): "+a\n"}
    attempts[user_profiles_dir() / "mine.yaml"] = "budget: 256\npolicy: sink\n"
    attempts[user_profiles_dir() / "default.yaml"] = "temperature: 0.5\n"
    for file, text in attempts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in ("state/prepared/a.safetensors", "state/compiled/step-0.so", "data/archives/x/y"):
        (home / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "home" / name).write_bytes(b"x" * 100)
    (home / "home" / "cwd").mkdir()
    servers_file(home / "home" / "cwd")
    config = AutoConfig.for_model(
        "llama", vocab_size=len(hub_tokenizer()), hidden_size=32, intermediate_size=32,
        num_hidden_layers=24, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(home / "home" / "cwd" / "deep")
    hub_tokenizer().save_pretrained(home / "home" / "cwd" / "deep")
    if CAN_BUILD:
        copying_compiler(home / "bin")
        with Started(home, home / "first", "auto") as one, one.run("ask", "Hello") as command:
            command.close_input()
            assert command.ended(60) == 0, command.errors
            shutil.copytree(one.home.folder / "state", home / "home" / "state", dirs_exist_ok=True)


class Started:
    """A home as `fill` made it, copied to a folder of its own, maybe a small disk."""

    def __init__(self, whole: Path, folder: Path, compiles: str, free: int | None = None) -> None:
        self.is_mounted = False
        folder.mkdir()
        if free is not None and _MOUNTS:
            size = sum(one.stat().st_size + 4096 for one in whole.rglob("*")) + free
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "sirchat-attack", str(folder)]
            self.is_mounted = not subprocess.run(mount, check=False).returncode
        self.home = CommandHome(
            folder,
            SIRCHAT_MAX_NEW_TOKENS="4",
            SIRCHAT_COMPILE=compiles,
            CXX=str(whole / "bin" / "compiler"),
        )
        shutil.copytree(whole / "home", folder, dirs_exist_ok=True)

    def __enter__(self) -> Started:
        return self

    def run(self, *words: str, jumps: Sequence[int] = ()) -> ForkedCommand:
        return self.home.run(*words, in_terminal=False, ahead=jumps)

    def __exit__(self, *error: object) -> None:
        """End what learns in the background, and remove the home."""
        folder = self.home.folder
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"SIRCHAT_HOME={folder}\0".encode() in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        for place in folder.rglob("*"):
            with suppress(OSError):
                place.chmod(0o700)
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder)


def damage(random: Random, home: Path) -> str:
    """Harm one of the files or folders; returns which, and how."""
    place = random.choice(sorted(one for one in home.rglob("*") if one.name not in ("tmp", "cwd")))
    return f"{harm(random, place)} in {place.parent.relative_to(home)}"


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
    whole = tmp_path / "whole"
    fill(whole, monkeypatch)

    def start(random: Random) -> None:
        words = list(random.choice(random.choice((_WITHOUT_A_CHAT, _CHATS, _CHATS))))
        if random.random() < 0.02:
            words = list(_LEARNS)
        is_chat = words in (*_CHATS, _LEARNS)
        if is_chat or words == ["--show"]:
            words += flags(random)
        compiles = random.choice(("off", "auto", "auto"))
        free = random.choice((0, 2**14, 2**20, 50 * 2**20)) if random.random() < 0.15 else None
        jumps = random.choices(_JUMPS, k=9) if random.random() < 0.15 else ()
        with Started(whole, Path(tempfile.mkdtemp(dir=tmp_path)) / "home", compiles, free) as one:
            harms = random.choice((0, 1, 1, 2, 3))
            did = [damage(random, one.home.folder) for _ in range(harms)]
            with one.run(*words, jumps=jumps) as command:
                for line in random.choices(_LINES, k=random.randint(1, 3)):
                    command.send(f"{line}\n")
                command.close_input()
                code = command.ended(_SECONDS)
                said = (command.shown + command.errors).decode(errors="replace")
        about = f"{did}, {words}, compile {compiles}, free {free}, clock {jumps}: code {code}"
        if code not in (0, 1, 2) or "Traceback" in said or "Error:" in said:
            raise ValueError(f"{about}: {said[-300:]!r}")
        refuse_odd_display(said)
        if code and "sirchat: " not in said and words != ["doctor"]:  # which tells it in a list
            raise ValueError(f"{about} without a reason: {said[-300:]!r}")

    attack(start, few=2, seconds=60)
