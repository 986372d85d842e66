"""`sirchat ask`: one question from the shell, and nothing but the reply on standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from command import run
from sirchat.engine.sampling import Sampler
from speaking import saying
from terminal import Terminal
from warm_python import warm_python


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))


def test_only_the_reply_is_printed() -> None:
    done = run("ask", "Tell", "me a joke.")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "ASSISTANT" not in done.stdout
    assert done.stdout.endswith("\n")
    assert done.stdout.strip() == run("ask", "Tell me a joke.").stdout.strip()


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
