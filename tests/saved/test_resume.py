"""`--resume`, `--rebuild`, `--no-save` and the `sessions` commands, in a terminal."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from command import run
from sirchat.cli.app import _with_defaults
from terminal import Terminal

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.mark.slow
def test_a_resumed_chat_remembers_and_the_session_commands_work(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.say("My name is Anna.")
        chat.wait_prompt()
        chat.say("/exit")
        assert chat.ended() == 0
    listed = run("sessions", "list")
    assert "My name is Anna." in listed.stdout
    with Terminal("--resume", home=tmp_path) as chat:
        chat.wait_prompt()
        assert "2 messages" in chat.text
        assert "you: My name is Anna." in chat.text
        assert "Anna" in chat.ask("What is my name?")
        chat.say("/exit")
        assert chat.ended() == 0
    shown = run("sessions", "show", "last").stdout
    assert shown.startswith("USER: My name is Anna.\nASSISTANT: ")
    assert "USER: What is my name?" in shown
    exported = run("sessions", "export", "last").stdout
    assert exported.count('"role": "user"') == 2
    file = tmp_path / "kept.jsonl"
    file.write_text("mine", encoding="utf-8")
    refused = run("sessions", "export", "last", str(file))
    assert (refused.returncode, file.read_text(encoding="utf-8")) == (2, "mine")
    assert "--force" in refused.stderr
    assert run("sessions", "export", "last", str(file), "--force").returncode == 0
    assert file.read_text(encoding="utf-8") == exported
    assert run("sessions", "rm", "last", "--yes").returncode == 0
    assert "Anna" not in run("sessions", "list").stdout


@pytest.mark.slow
def test_flags_change_the_settings_of_a_resumed_chat(tmp_path: Path) -> None:
    with Terminal("--policy", "sink", "--budget", "64", "--recent", "8", home=tmp_path) as chat:
        for _ in range(2):
            chat.say("Tell me a joke. " * 6)
            chat.wait_prompt()
        chat.say("/exit")
        assert chat.ended() == 0
    flags = ("--budget", "512", "--top-k", "none", "--policy", "entropy")
    with Terminal("--resume", "last", *flags, home=tmp_path) as chat:
        stats = chat.ask("/stats")
        assert re.search(r"; ([\d,]+) of 512 held, 0 evicted", stats)
        assert "policy entropy" in stats
        chat.say("/exit")
        assert chat.ended() == 0
    again, bare = ("--resume", "last", "--compile", "auto"), {"CXX": "no-such-compiler"}
    with Terminal(*again, home=tmp_path, environ=bare) as chat:
        assert "compile is auto" in chat.ask("/set compile")
        assert chat.leave() == 0
    with Terminal("--resume", "--seed", "7", home=tmp_path) as chat:
        assert chat.ended() == 2
        assert "seed" in chat.text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--resume", "last"), "standard input"),
        (("--rebuild",), "--resume"),
        (("--resume", "x", "sessions", "list"), "before sessions"),
        (("sessions", "show", "nothing"), "no saved session"),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_one_line(
    arguments: tuple[str, ...], word: str
) -> None:
    done = run(*arguments, text="Hello!\n")
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert word in done.stderr


def test_resume_alone_means_the_last_session_but_not_after_a_command() -> None:
    assert _with_defaults(["--resume"]) == ["--resume=last"]
    assert _with_defaults(["--resume", "--seed", "1"]) == ["--resume=last", "--seed", "1"]
    assert _with_defaults(["--resume", "x"]) == ["--resume", "x"]
    assert _with_defaults(["train", "tiny", "--resume"]) == ["train", "tiny", "--resume"]
    assert _with_defaults([]) == []


@pytest.mark.slow
def test_two_chats_never_write_one_session(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.say("Hello!")
        chat.wait_prompt()
        refused = run("sessions", "rm", "last", "--yes")
        assert refused.returncode == 1
        assert "open in another process" in refused.stderr
        (ident,) = re.findall(r"(?m)^ *(20\S+).*\(open\)", run("sessions", "list").stdout)
        refused = run("sessions", "rm", ident, "--yes")
        assert refused.returncode == 1
        assert "in use" in refused.stderr
        with Terminal("--resume", home=tmp_path) as other:
            assert other.ended() == 1
            told = "".join(other.text.split())
            assert f"inusebyanotherprocess,{chat.child._process.pid}on{platform.node()}," in told
            assert f"sirchat--resume{ident}--branchNAME" in told
        with Terminal("--resume", ident, "--branch", "other", home=tmp_path) as other:
            other.ask("What is new?")
            assert "2 messages" in chat.ask("/stats")
            assert "4 messages" in other.ask("/stats")
            assert other.leave() == 0
        assert '"other"' in chat.ask("/branches") or "other" in chat.text
    assert run("--branch", "x", "sessions").returncode == 2
    assert "--branch has no effect without" in run("--branch", "x").stderr


def test_no_save_leaves_no_file(tmp_path: Path) -> None:
    with Terminal("--no-save", home=tmp_path) as chat:
        chat.say("Hello!")
        chat.wait_prompt()
        chat.say("/exit")
        assert chat.ended() == 0
    assert not list((tmp_path / "data").glob("**/*"))
