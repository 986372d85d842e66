"""`--resume`, `--rebuild`, `--no-save` and the `sessions` commands, in a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chatting import tiny
from command import run
from saved_chats import SAYINGS, Chat, saved
from sirchat.chat.summary import pin_summary
from sirchat.cli.app import _complete_resume_flag
from sirchat.paths import sessions_dir
from sirchat.saved.session_list import list_sessions
from sirchat.ui.saved_chat import show_resumed_chat
from sirchat.ui.typed_input import open_history
from terminal import WARM, Terminal

pytestmark = pytest.mark.usefixtures("folder")


def left(*texts: str, **settings: Any) -> None:
    """A saved chat of `tiny` that was left."""
    chat = Chat(tiny(), **{"budget": 1024, "max_new_tokens": 40, "decay": 1.0, **settings})
    chat.say(*texts)
    chat.saved_chat.close()


@pytest.mark.slow
def test_a_resumed_chat_remembers_and_is_shown_and_exported(tmp_path: Path) -> None:
    left("My name is Anna.")
    with Terminal("--resume", home=tmp_path) as chat:
        chat.wait_prompt()
        assert "2 messages" in chat.text
        assert "you: My name is Anna." in chat.text
        assert "Anna" in chat.ask("What is my name?")
        assert chat.leave() == 0
    shown = run("sessions", "show", "last").stdout
    assert shown.startswith("USER: My name is Anna.\nASSISTANT: ")
    assert "USER: What is my name?" in shown
    file = tmp_path / "kept.jsonl"
    file.write_text("mine")
    refused = run("sessions", "export", "last", str(file))
    assert (refused.returncode, file.read_text()) == (2, "mine")
    assert "--force" in refused.stderr
    assert run("sessions", "export", "last", str(file), "--force").returncode == 0
    assert file.read_text().count('"role": "user"') == 2


@pytest.mark.slow
def test_a_chat_that_is_open_can_be_shown_and_exported_and_its_summary_is_called_so(
    tmp_path: Path,
) -> None:
    chat = Chat(tiny(), budget=1024)
    chat.say("I live in Rome.")
    list(pin_summary(chat.session, "Rome."))
    chat.saved_chat.save()
    (listed,) = list_sessions(sessions_dir()).sessions
    assert listed.first_message == listed.last_message == "I live in Rome."
    said = [turn.text for turn in chat.session.turns]
    for name in ("last", list_sessions(sessions_dir()).sessions[0].id):
        roles, _, texts = zip(
            *(line.partition(": ") for line in run("sessions", "show", name).stdout.splitlines()),
            strict=True,
        )
        assert [*texts] == said
        assert roles == ("USER", "ASSISTANT", "SUMMARY", "SUMMARY")
        assert run("sessions", "export", name).stdout.count('"role": "user"') == 2
    chat.do(f"/export md {tmp_path / 'chat.md'}")
    written = (tmp_path / "chat.md").read_text("utf-8")
    heads = [line for line in written.splitlines() if line.startswith("## ")]
    assert heads == ["## You", "## Model", "## Summary", "## Summary"]
    assert "  summary: …far, by the assistant: Rome." in chat.do("/search Rome")
    show_resumed_chat(chat.session, chat.screen)
    assert "\nsummary: Noted." in chat.out.getvalue()


@pytest.mark.slow
def test_flags_change_the_settings_of_a_resumed_chat(tmp_path: Path) -> None:
    left(*["Tell me a joke. " * 6] * 2, policy="sink", budget=64, recent=8)
    flags = ("--budget", "512", "--top-k", "none", "--policy", "entropy", "--compile", "auto")
    bare = {"CXX": "no-such-compiler"}
    with Terminal("--resume", "last", *flags, home=tmp_path, environ=bare) as chat:
        stats = " ".join(chat.ask("/stats").split())  # a line breaks where the window ends
        assert re.search(r"; ([\d,]+) of 512 held, 0 evicted", stats)
        assert "policy entropy" in stats
        assert "compile is auto" in chat.ask("/set compile")
        assert chat.leave() == 0
    with Terminal("--resume", "--seed", "7", home=tmp_path, environ=bare) as chat:
        assert chat.ended() == 2
        assert "seed" in chat.text


@pytest.mark.slow
def test_two_chats_never_write_one_session(tmp_path: Path) -> None:
    chat = Chat(tiny(), budget=1024)
    chat.say("Hello!")
    (ident,) = re.findall(r"(?m)^ *(20\S+).*\(open\)", run("sessions", "list").stdout)
    for name, told in (("last", "open in another process"), (ident, "in use")):
        refused = run("sessions", "rm", name, "--yes")
        assert refused.returncode == 1
        assert told in refused.stderr
    with Terminal("--resume", home=tmp_path) as other:
        assert other.ended() == 1
        told = "".join(other.text.split())
        assert "isopeninanotherprocess(closeitthere" in told
        assert "--branchNAMEgoesoninacopy" in told
    with Terminal("--resume", ident, "--branch", "other", home=tmp_path) as other:
        other.ask("What is new?")
        assert "2 messages" in chat.do("/stats")
        assert "4 messages" in other.ask("/stats")
        assert other.leave() == 0
    assert "other" in chat.do("/branches")
    assert run("--branch", "x", "sessions").returncode == 2
    assert "--branch has no effect without" in run("--branch", "x").stderr


def test_without_a_terminal_a_yes_is_needed_and_a_damaged_chat_goes_too(
    folder: Path, tmp_path: Path
) -> None:
    ident = saved(folder, "my trip")
    refused = run("sessions", "rm", "my trip")
    told = f"sirchat: {ident} is not deleted: deleting needs a confirmation (add --yes)\n"
    assert (refused.returncode, refused.stderr) == (2, told)
    assert list_sessions(folder).sessions
    done = run("sessions", "rm", "my trip", "-y")
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, f"removed chat {ident}")
    assert not list_sessions(folder).sessions
    assert not (tmp_path / "state").exists(), "a history was made for it"
    saved(folder)
    (path,) = folder.glob("*.sqlite")
    content = bytearray(path.read_bytes())
    content[200:4000] = bytes(3800)
    path.write_bytes(content)
    assert run("sessions", "rm", path.stem, "--yes").returncode == 0
    assert not path.exists()


@pytest.mark.slow
def test_at_a_terminal_it_says_which_chat_and_asks(folder: Path) -> None:
    ident, home = saved(folder, "my trip"), folder.parents[1]
    command = (WARM, "-m", "sirchat", "sessions", "rm", "last")
    for answer, code, left in (("\r", 1, 1), ("y\r", 0, 0)):
        with Terminal(*command, home=home, columns=60) as rm:
            rm.wait(r"delete this chat\? \[y/N\]")
            asked = " ".join(rm.text.split())
            assert f'{ident}, called "my trip": 4 messages, begins "{SAYINGS[0]}"' in asked
            rm.send(answer)
            assert rm.ended() == code
            assert ("nothing is deleted" in rm.text) == bool(left)
        assert len(list_sessions(folder).sessions) == left


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--resume", "last"), "standard input"),
        (("--rebuild",), "--resume"),
        (("--resume", "x", "sessions", "list"), "No such option: --resume"),
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
    assert _complete_resume_flag(["--resume"]) == ["--resume=last"]
    assert _complete_resume_flag(["--resume", "--seed", "1"]) == ["--resume=last", "--seed", "1"]
    assert _complete_resume_flag(["--resume", "x"]) == ["--resume", "x"]
    assert _complete_resume_flag(["--resume", "ask", "x"]) == ["--resume=last", "ask", "x"]
    assert _complete_resume_flag(["train", "tiny", "--resume"]) == ["train", "tiny", "--resume"]
    assert _complete_resume_flag([]) == []


def test_what_stays_of_it_is_said(folder: Path) -> None:
    chat = Chat()
    chat.say(*SAYINGS[:2])
    chat.do("/save trunk")
    chat.do("/branch twig")
    chat.saved_chat.close()
    open_history(print).append_string(SAYINGS[0])
    done = run("sessions", "rm", "twig", "--yes")
    assert "lines typed in it stay in " in done.stderr
    assert "other chats of its family stay (1 chat): " in done.stderr
