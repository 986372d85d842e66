"""Random lines to the slash commands: done, or refused in one line; nothing unfiltered is shown.

Lines follow each other in one chat for a while, so a failure may need the seeds before it, too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from random import Random

import pytest

from attacking import attack, odd_text, refuse_odd_display
from saved_chats import SAYINGS, Chat
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError
from sirchat.ui.commands import Commands

_WORDS = [
    "last", "turn", "turn 1", "0", "-1", "10**9", "all", "top", "next", "top 3", "--yes",
    "--force", "--everywhere", "md", "json", "jsonl", "html", "txt", "out.md", "/etc/passwd",
    "../x", "on", "off", "auto", "none", "some", "words", '"some words"', '"', "window", "entropy",
    "random", "full", "sink", "recent=3", "sample=9", "96", "64", "20", "1024", "0.5", "1",
    "hybrid", "bm25", "mips", "attention", "full", "live", "--temperature", "0.9", "code", "all",
    "here.txt", "tiny", "odd", "good name",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written below a temporary folder, and no program is started."""

    def refuse(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(2, "no program here")

    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("EDITOR", "VISUAL", "PAGER", "DISPLAY", "WAYLAND_DISPLAY", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    Path("here.txt").write_text("some text\n")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "system", refuse)


def line(random: Random) -> str:
    """A command, known or not, with arguments that may fit."""
    name = random.choice([*Commands.names(), "set", "set", "erase", "pin", odd_text(random, 1)])
    words = random.choices([*_WORDS, *Profile.model_fields], k=random.randrange(4))
    if random.random() < 0.4:
        words.insert(random.randrange(len(words) + 1), odd_text(random, 1))
    return f"/{name} {' '.join(words)}"


@pytest.mark.slow
def test_every_line_is_done_or_refused_in_one_line() -> None:
    state: list[Chat] = []

    def run(random: Random) -> None:
        if not state or random.random() < 0.02:
            state[:] = [Chat()]
            state[0].say(*SAYINGS[: random.randrange(3)])
        chat, text = state[0], line(random)
        text = text.encode("utf-8", "replace").decode()
        if random.random() < 0.1:
            text += "\udcff"  # a byte that is no UTF-8
        refuse_odd_display(chat.do(text))
        if chat.session.resident > chat.session.budget and chat.session.profile.policy != "full":
            raise ValueError(f"{chat.session.resident} held of {chat.session.budget}")

    attack(run, 150)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    chat = Chat()
    for text in (
        "/model " + "[" * 3000,
        "/model a\0b",
        "/model ~nobody-at-all/x",
        "/" + "a" * 9000,
    ):
        with pytest.raises(SirchatError) as caught:
            chat.do(text)
        assert len(str(caught.value)) < 500


def test_an_error_of_a_command_shows_no_control_character() -> None:
    with pytest.raises(SirchatError, match="u000e") as caught:
        Chat().do("/read a\x0eb\x9b.txt")
    refuse_odd_display(str(caught.value))
