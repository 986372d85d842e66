"""`sirchat ask`: one question from the shell, and nothing but the reply on standard output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from chatting import tiny
from command import run
from sirchat.engine.sampling import Sampler
from speaking import saying
from terminal import Terminal
from warm_python import warm_python


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")


def test_only_the_reply_is_printed() -> None:
    done = run("ask", "Tell", "me a joke.")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "ASSISTANT" not in done.stdout
    assert done.stdout.endswith("\n")
    assert done.stdout.strip() == run("ask", "Tell me a joke.").stdout.strip()


def test_a_model_that_nobody_chose_is_said_to_be_a_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIRCHAT_MODEL")
    noted = run("ask", "Tell me a joke.").stderr
    assert noted.startswith("tiny is a toy")
    assert "sirchat models default NAME" in noted
    assert len(noted.splitlines()) == 1
    assert run("ask", "-m", "tiny", "Tell me a joke.").stderr == ""


@pytest.mark.parametrize(
    ("thinking", "printed", "noted"),
    [
        ("show", "<think>Anna?</think>\n\nHello.\n", ""),
        ("fold", "Hello.\n", "the reasoning was left out; --thinking show prints it\n"),
        ("hide", "Hello.\n", ""),
    ],
)
def test_reasoning_is_left_out_if_asked_for(
    thinking: str, printed: str, noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("<think>Anna?</think>\n\nHello."))
    done = run("ask", "Hi.", "--thinking", thinking)
    assert (done.stdout, done.stderr) == (printed, noted)


def test_what_is_piped_in_stands_before_the_question() -> None:
    assert "Anna" in run("ask", "What is my name?", text="My name is Anna.\n").stdout
    (user,) = turns(run("ask", "--json", "What is my name?", text="My name is Anna.\n").stdout)[:1]
    assert user == "My name is Anna.\n\nWhat is my name?"


def test_what_is_piped_in_can_be_the_question() -> None:
    assert turns(run("ask", "--json", text="Tell me a joke.\n").stdout)[0] == "Tell me a joke."


LONG = "Anna has a red bicycle. " * 100  # 1,012 tokens with the question
EXCESS = "read 1,012 tokens, {} held; --budget 1024 would hold all"


def held(*arguments: str, text: str) -> tuple[int, int]:
    """Tokens held and read when the reply to "Who has it?" ended."""
    done = run("ask", "--json", "Who has it?", *arguments, text=text)
    end = json.loads(done.stdout.splitlines()[-1])
    return end["resident"], end["seen"]


def test_what_is_piped_in_is_held_whole_unless_a_budget_is_given() -> None:
    assert held(text=LONG * 2) == (2013, 2013)
    assert held("--budget", "256", text=LONG) == (256, 1013)


def test_a_piped_text_takes_no_more_than_half_of_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_bytes = tiny().row_bytes
    monkeypatch.setattr("sirchat.chat.plain_reply.free_memory", lambda: 2 * 1500 * row_bytes)
    assert held(text=LONG * 2) == (1500, 2013)


@pytest.mark.parametrize("question", [["ask", "Who has it?"], ["--quiet"]])
def test_what_is_not_held_is_said_on_stderr(question: list[str]) -> None:
    done = run(*question, "--budget", "128", text=f"{LONG}\n")
    assert re.search(r"read 1,0\d\d tokens, 1\d\d held; --budget 1024 would hold all", done.stderr)
    assert "read 1" not in run(*question, "--budget", "1040", text=f"{LONG}\n").stderr


def test_a_text_beyond_the_context_is_said_to_be() -> None:
    done = run("ask", text=LONG * 3)
    assert "read 3,0" in done.stderr
    assert "the model's context, 2,048 tokens, is too short for all" in done.stderr


def turns(lines: str) -> list[str]:
    events = [json.loads(line) for line in lines.splitlines()]
    return [event["text"] for event in events if event["event"] == "turn"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-new-tokens", "2", "ask", "Tell me a joke."),
        ("ask", "Tell me a joke.", "--max-new-tokens", "2"),
        ("-m", "tiny", "ask", "--max-new-tokens", "2", "Tell me a joke."),
        ("ask", "-m", "tiny", "--max-new-tokens", "2", "Tell me a joke."),
    ],
)
def test_flags_may_stand_before_and_after(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) <= 2
    assert "cut at the length limit" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        (["ask"], "", ["no question", "sirchat ask"]),
        (["ask", "  "], "\n\n", ["no question"]),
        (["ask", "hi", "--resume", "none"], "", ["none"]),
        (["ask", "--budget", "3", "hi"], "", ["--budget"]),
        (["ask", "hi"], "\udcff\udcfe", ["UTF-8"]),
        (["--feed", "ask", "hi"], "", ["--feed", "ask"]),
        (["hello"], "", ['"hello"', 'sirchat ask "hello"']),
        (["what is up?"], "", ['sirchat ask "what is up?"']),
        (["sesions"], "", ["sirchat sessions"]),
    ],
)
def test_what_cannot_be_asked_gets_one_line(
    arguments: list[str], text: str, words: list[str]
) -> None:
    done = run(*arguments, text=text)
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.slow
def test_a_saved_chat_is_asked_in_its_own_memory_and_goes_on(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.say("My name is Anna.")
        chat.wait_prompt()
        chat.say("/save holiday")
        chat.wait_prompt()
        chat.say("/exit")
        assert chat.ended() == 0
    assert "Anna" in run("ask", "--resume", "holiday", "What is my name?").stdout
    shown = run("sessions", "show", "holiday").stdout
    assert shown.count("USER: ") == 2
    assert "What is my name?" in shown
    assert "What is my name?" not in run("ask", "Tell me a joke.").stdout  # which is not saved
    assert run("sessions", "show", "holiday").stdout == shown


@pytest.mark.slow
def test_ctrl_c_ends_it_with_130(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("What a lovely day it is. " * 40_000, encoding="utf-8")
    with text.open("rb") as stdin:
        process = subprocess.Popen(
            [*warm_python(), "-m", "sirchat", "ask", "--json", "What is this?"],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"SIRCHAT_HOME": str(tmp_path)},
        )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    last = json.loads(rest.splitlines()[-1])
    assert (first["event"], last["event"]) == ("session", "end")
    assert process.returncode == 130
