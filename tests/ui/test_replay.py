"""Transcripts through the command line: replies, events, and evictions against an oracle."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler, session, tiny
from command import run
from json_oracle import check_stream
from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn, parse_transcript
from sirchat.ui.replay import ReplayOptions, replay
from sirchat.ui.screen import Screen


def _replayed(
    turns: list[TranscriptTurn], *, feed: bool = True, **settings: Any
) -> list[dict[str, Any]]:
    """The event stream of a replay on a model with random weights."""
    out = io.StringIO()
    chat = session(babbler(), tokens=True, **settings)
    replay(chat, turns, Screen(out, io.StringIO()), ReplayOptions(feed, json=True))
    return [json.loads(line) for line in out.getvalue().splitlines()]


def _transcript(rounds: int) -> list[TranscriptTurn]:
    """Rounds of very different lengths, with sentences in them."""
    words = "The old man. went to sea! and saw 3 ships, far away? 海は広い。 yes".split()  # noqa: SIM905
    turns = []
    for i in range(rounds):
        text = " ".join(words[(i + j) % len(words)] for j in range(3 + (17 * i) % 40))
        turns.append(TranscriptTurn("user", text, 2 * i))
        turns.append(TranscriptTurn("assistant", text[::-1], 2 * i + 1))
    return turns


def test_the_dialogue_goes_to_stdout_and_the_status_to_stderr() -> None:
    done = run("--budget", "128", text="My name is Anna.\nTell me a joke.\nWhat is my name?\n")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["USER", "ASSISTANT"] * 3
    assert "Anna" in lines[-1]
    assert "holds" in done.stderr
    said = [t.content for t in parse_transcript(done.stdout.encode(), "out") if t.role == "user"]
    assert said == ["My name is Anna.", "Tell me a joke.", "What is my name?"]


def test_quiet_prints_the_replies_alone() -> None:
    done = run("--quiet", text="My name is Anna.\nWhat is my name?\n")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "Your name is Anna."
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


def test_a_line_that_looks_like_a_command_is_only_said(tmp_path: Path) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("/exit\n/policy full\nHello.\n", encoding="utf-8")
    events = [json.loads(e) for e in run("replay", str(file), "--json").stdout.splitlines()]
    assert [e["text"] for e in events if e.get("role") == "user"] == file.read_text().splitlines()
    assert events[0]["event"] == "session"
    assert events[0]["profile"]["policy"] == "salience"
    assert events[-1]["event"] == "end"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        *((one, {}) for one in ("window", "sink", "entropy", "random", "interval")),
        *((one, {"system": "Be kind. Always."}) for one in ("anchor", "entropy")),
        *(("reservoir", {"policy_options": {"sample": sample}}) for sample in (None, 20)),
    ],
)
def test_every_eviction_follows_the_policy(policy: str, settings: dict[str, Any]) -> None:
    settings = {"decay": 0.8 if policy != "reservoir" else 1.0} | settings
    events = _replayed(_transcript(9), policy=policy, budget=96, recent=8, **settings)
    assert check_stream(events) > 60


def test_an_unanswered_last_turn_is_answered_even_when_feeding() -> None:
    talk = ("user", "My name is Anna."), ("assistant", "Hello, Anna."), ("user", "What is my name?")
    chat, out = session(tiny(), max_new_tokens=30), io.StringIO()
    turns = [TranscriptTurn(role, text, line) for line, (role, text) in enumerate(talk, 1)]  # type: ignore[arg-type]
    replay(chat, turns, Screen(out, io.StringIO()), ReplayOptions(feed=True))
    *lines, reply = out.getvalue().splitlines()
    assert lines == [f"{role.upper()}: {text}" for role, text in talk]
    assert "Anna" in reply


def test_a_system_turn_sets_the_prompt_and_what_does_not_fit_is_named_with_its_line() -> None:
    turns = [
        TranscriptTurn("system", "Be kind.", 1),
        TranscriptTurn("user", "Hi.", 2),
        TranscriptTurn("system", "No.", 3),
    ]
    events = _replayed(turns, feed=False, max_new_tokens=3)
    assert next(e for e in events if e.get("role") == "system")["text"] == "Be kind."
    assert "line 3" in next(e for e in events if e["event"] == "notice")["text"]
    with pytest.raises(TranscriptError, match="line 7"):
        _replayed([TranscriptTurn("assistant", "Hello.", 7)])


@pytest.mark.slow
def test_generated_replies_follow_the_policy_too() -> None:
    settings = {"policy": "entropy", "budget": 64, "recent": 8, "max_new_tokens": 120}
    events = _replayed(_transcript(3), feed=False, **settings)
    assert check_stream(events) > 40


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"role": "user", "content": "a"}\n{"role": "cook", "content": "b"}\n', "line 2"),
        ('{"role": "user", "content": "a"}\nnot json\n', "line 2"),
        ("\udcff\udcfe\n", "UTF-8"),
    ],
)
def test_malformed_input_names_file_and_line_and_exits_2(
    text: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = run("replay", str(file))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "talk.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
