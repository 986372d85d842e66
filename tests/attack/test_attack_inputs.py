"""Random settings, transcripts, slash commands and variables: taken, or refused in one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
import timeit
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attacking import attack, mutated, odd_json, odd_text, refuse_odd_display
from saved_chats import SAYINGS, Chat
from sirchat.chat.conversation import build_sampling
from sirchat.chat.settings import build_cache_settings
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile, load_profile, profile_as_yaml
from sirchat.config.values import format_setting, parse_option, parse_value
from sirchat.errors import TranscriptError
from sirchat.text.transcript import FORMATS, iter_turns, parse_transcript
from sirchat.ui.commands import Commands

_KEYS = [*Profile.model_fields, "polcy", "", "\x1b[1m", "a" * 300]


def value(random: Random) -> str:
    """A value as it may be typed."""
    if random.random() < 0.5:
        return odd_text(random, 1)
    made = random.choice(
        (random.uniform(-1, 20), random.randrange(-5, 3000), 10 ** random.uniform(-330, 300))
    )
    return random.choice((str(made), f"{made:g}", f"{made:,}"))


def use(profile: Profile) -> None:
    """What a chat does with a profile before it begins."""
    build_cache_settings(profile)
    build_sampling(profile)
    "".join(format_setting(one) for one in profile.model_dump().values()).encode()


def test_every_value_of_a_setting_is_taken_or_refused_in_one_line() -> None:
    def read(random: Random) -> None:
        key, text = random.choice(_KEYS), value(random)
        parse_option(text)
        use(changed_profile(Profile(), "--set", **{key: parse_value(key, text)}))

    attack(read)


def test_every_profile_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "odd.yaml", profile_as_yaml(Profile()).encode()

    def read(random: Random) -> None:
        if random.random() < 0.4:
            data = mutated(random, whole, 6)
        else:
            lines = (
                f"{random.choice(_KEYS)}{random.choice((': ', ':', ' '))}{value(random)}"
                for _ in range(random.randrange(1, 5))
            )
            data = "\n".join(lines).encode("utf-8", "surrogatepass")
        path.write_bytes(data)
        values = load_profile(str(path))
        use(changed_profile(Profile(), "odd", **values))

    attack(read)


@pytest.mark.parametrize("text", ["[" * 3000, "{" * 3000, "[{a: " * 3000])
def test_brackets_that_are_too_deep_take_no_time(text: str) -> None:
    taken = timeit.repeat(lambda: parse_option(text), time.process_time, number=1, repeat=3)
    assert min(taken) < 0.05  # the garbage collector may run in one of them


_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "Who?"},
    {"from": "human", "value": "odd"},
]


def json_value(random: Random) -> Any:
    """A message, or some, in which parts are odd."""
    value: Any = random.choice([_MESSAGES[0], _MESSAGES[1], _MESSAGES, {"messages": _MESSAGES}])
    for _ in range(random.randrange(4)):
        value = odd_json(random, value)
    return value


def transcript(random: Random) -> bytes:
    """A transcript of some format, often a damaged one."""
    kind = random.randrange(5)
    if kind == 0:
        text = "\n".join(json.dumps(json_value(random)) for _ in range(random.randrange(1, 5)))
    elif kind == 1:
        indent = random.choice((None, 1))
        text = json.dumps({"conversations": [json_value(random) for _ in range(3)]}, indent=indent)
    elif kind == 2:
        heads = ["USER: ", "user:", "Assistant: ", "SYSTEM:", ""]
        lines = (random.choice(heads) + odd_text(random, 1) for _ in range(random.randrange(1, 6)))
        text = "\n".join(lines)
    elif kind == 3:
        text = random.choice(("[", '{"a":', "[{", '"', "-", "1")) * random.choice((3, 500, 200_000))
    else:
        text = odd_text(random)
    encoding = random.choice(["utf-8"] * 6 + ["utf-16", "utf-8-sig", "utf-7"])
    data = text.encode(encoding, random.choice(("surrogatepass", "replace")))
    return mutated(random, data) if random.random() < 0.5 else data


def test_every_transcript_is_read_or_refused_in_one_line() -> None:
    def read(random: Random) -> None:
        for turn in parse_transcript(transcript(random), "t", random.choice(FORMATS)):
            assert turn.role in ("user", "assistant", "system")
            turn.content.encode()

    attack(read)


def test_a_line_of_a_pipe_is_refused_once_it_is_too_long() -> None:
    class Letters(io.RawIOBase):
        left = 100_000_000

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            size = min(len(buffer), self.left)
            buffer[:size] = b"a" * size
            self.left -= size
            return size

    letters = Letters()
    with pytest.raises(TranscriptError, match="too long; allowed: up to 4,194,304 bytes"):
        list(iter_turns(io.BufferedReader(letters), "standard input", "auto"))
    assert letters.left > 95_000_000


_WORDS = [
    "last", "turn", "turn 1", "0", "-1", "10**9", "all", "top", "next", "top 3", "--yes",
    "--force", "--everywhere", "md", "json", "jsonl", "html", "txt", "out.md", "/etc/passwd",
    "../x", "on", "off", "auto", "none", "some", "words", '"some words"', '"', "window", "entropy",
    "random", "full", "sink", "recent=3", "sample=9", "96", "64", "20", "1024", "0.5", "1",
    "meaning", "words", "mips", "attention", "full", "live", "--temperature", "0.9", "code", "all",
    "here.txt", "tiny", "odd", "good name",
]  # fmt: skip


@pytest.fixture
def confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("confined")
def test_every_line_is_done_or_refused_in_one_line() -> None:
    """Lines follow each other in one chat, so a failure may need the seeds before it, too."""
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

    attack(run)
