"""What a shell does with sirchat: pipes, loops, files, names with blanks, and hints that run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from chatting import tiny
from command import refused, run
from saved_chats import Chat, saved
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore
from terminal import WARM, Terminal
from warm_python import warm_python

COLD = f"PYTHONPATH={Path(__file__).parents[2]} {sys.executable} -m sirchat"  # a slow start
SIRCHAT = " ".join([*warm_python(), "-m", "sirchat"])


@pytest.fixture(autouse=True)
def here(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")
    monkeypatch.chdir(own_home)
    return own_home


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line in bash, where `sirchat` is the program, and no input is given."""
    return subprocess.run(
        ["bash", "-c", f"sirchat() {{ {SIRCHAT} \"$@\"; }}\n{line}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | environ,
    )  # fmt: skip


def saved_with_tiny(name: str) -> None:
    """A saved chat of `tiny` in which two messages were said."""
    chat = Chat(tiny(), budget=1024, max_new_tokens=8)
    chat.say("My name is Anna.")
    chat.do(f"/save {name}")
    chat.crash()


def test_a_question_that_looks_like_a_flag_or_is_missing_is_told_how_to_be_asked() -> None:
    code, told = refused("ask", "-5 + 3 = ?")
    assert code == 2
    assert "sirchat" not in told.split("(")[1]
    assert told.endswith("(a question that begins with - follows --: ask -- '-5 + 3 = ?')\n")
    assert run("ask", "--", "-5 + 3 = ?").stdout.strip()
    done = run()
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        "standard input is empty: at a terminal, sirchat opens a chat; sirchat < FILE answers a "
        "transcript\n"
    )


def test_c_asks_in_the_last_chat_and_opens_it(here: Path, folder: Path) -> None:
    saved_with_tiny("other")
    saved_with_tiny("trip")
    for path in folder.glob("*.sqlite"):
        os.utime(path, (1, 1 + (path == find_session(folder, "trip"))))
    assert run("ask", "-c", "Thanks!").returncode == 0
    assert "USER: Thanks!" in run("sessions", "show", "trip").stdout
    with Terminal("-c", home=here) as chat:
        assert "4 messages" in chat.ask("/stats")
        told = "the last chat, trip, is open in another process"
        assert told in refused("ask", "-c", "Hi.")[1]
        assert "USER: Thanks!" in run("sessions", "show", "last").stdout
        with Terminal("--continue", home=here) as second:
            second.wait(r"is open in another\s+process")
            assert second.ended() == 1
    assert "USER: Hi." not in run("sessions", "show", "other").stdout


def test_settings_of_one_question_do_not_stay_in_the_chat(folder: Path) -> None:
    saved_with_tiny("trip")
    once = ("--max-new-tokens", "3", "--budget", "64", "--thinking", "hide", "--policy", "sink")
    done = run("ask", "--resume", "trip", "Hi.", *once)
    assert "stopped at the length limit" in done.stderr
    with SessionStore.open(find_session(folder, "trip")) as store:
        kept = saved_profile(store)
    assert (kept.budget, kept.thinking, kept.policy) == (1024, "show", "salience")
    assert kept.max_new_tokens == 8


def test_instructions_without_room_come_back_after_one_question_and_are_named_in_a_chat(
    here: Path, folder: Path
) -> None:
    chat = Chat(tiny(), budget=512, max_new_tokens=8)
    chat.say(f"Always use {'the word fox and ' * 8}the word sea.")
    chat.do("/save trip")
    chat.crash()
    assert run("ask", "--resume", "trip", "Hi.", "--budget", "96").returncode == 0
    with Terminal("--resume", "trip", home=here) as opened:
        assert "Always use the word fox" in " ".join(opened.ask("/pin").split())
    with Terminal("--resume", "trip", "--budget", "96", home=here) as opened:
        opened.wait_prompt()
        assert "is no longer pinned, as instructions have" in " ".join(opened.text.split())
        assert "nothing is pinned" in opened.ask("/pin")


# --- names and the shell


@pytest.mark.parametrize("name", ["train", "my trip", "it's `id`", "$HOME; ls", "ask"])
def test_the_hint_to_resume_runs_in_a_shell(name: str, folder: Path) -> None:
    chat = Chat()
    chat.say("Hello!")
    hint = " ".join(chat.do(f"/save {name}").split())
    command = hint.partition(", or ")[2]
    chat.crash()
    assert shlex.split(command)[-1] == f"--resume={name}"
    done = shell(f"printf '%s\\n' {command.removeprefix('sirchat ')}")
    assert done.stdout == f"--resume={name}\n"


def test_bash_completes_names_with_blanks_quoted(here: Path, folder: Path) -> None:
    saved(folder, "my trip to $HOME")
    (here / "bin").mkdir()
    (here / "bin/sirchat").write_text(f'#!/bin/sh\nexec {SIRCHAT} "$@"\n', encoding="utf-8")
    (here / "bin/sirchat").chmod(0o755)
    (here / "rc").write_text(run("completion", "bash").stdout + "PS1='$ '\n", encoding="utf-8")
    path = f"{here}/bin:{os.environ['PATH']}"
    bash = ("bash", "--noprofile", "--rcfile", str(here / "rc"), "-i")
    with Terminal(*bash, home=here, environ={"PATH": path}) as terminal:
        escaped = r"my\ trip\ to\ \$HOME"
        for typed, shown in (("my", escaped), ("'my", "'my trip to $HOME"), (r"my\ tr", escaped)):
            terminal.send(f"sirchat --resume {typed}\t")
            terminal.wait_screen(re.escape(f"--resume {shown}"))
            terminal.send("\x15")


# --- streams and windows


def test_a_long_text_is_read_behind_a_bar_that_goes_and_is_drawn_only_on_a_terminal(
    here: Path,
) -> None:
    done = shell("FORCE_COLOR=1 sirchat ask 'Hello!'")
    assert (done.returncode, done.stderr) == (0, "")
    (here / "long.txt").write_text("What a day it is. " * 400, encoding="utf-8")
    flags = ("ask", "-f", "long.txt", "What?", "--no-input", "--max-new-tokens=8", "--budget=512")
    with Terminal(WARM, "-m", "sirchat", *flags, home=here) as it:
        assert it.ended() == 0
    drawn = it.raw.decode()
    assert re.search(r"reading 2,[\d,]+ tokens", drawn)
    assert "reading" not in it.text


def test_lists_on_a_pipe_are_whole_and_exported_columns_are_not_the_window(
    here: Path, folder: Path
) -> None:
    chat = Chat()
    chat.say("What a long message this is, " * 8)
    chat.do("/save")
    (ident,) = [entry.id for entry in list_sessions(folder).sessions]
    (line,) = shell("FORCE_COLOR=1 sirchat sessions").stdout.splitlines()
    assert len(line) > 120
    listing = ("bash", "-c", f"COLUMNS=160 LINES=60 {SIRCHAT} sessions")
    with Terminal(*listing, home=here, columns=80) as it:
        it.ended()
        rows = it.everything.splitlines()
    assert rows[0].startswith(ident)
    assert rows[1].endswith("…")  # in two lines, as in any window of less than 120 columns


def test_a_closed_pipe_is_no_error_and_a_deleted_folder_is_said_to_be_gone(here: Path) -> None:
    done = shell("sirchat --help | true; echo ${PIPESTATUS[0]}")
    assert done.stderr == ""
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; {COLD} ask hi")
    assert done.stderr.splitlines()[-1] == (
        "sirchat: the working folder was deleted (cd to another one)"
    )


def asked(lines: str) -> str:
    """The message that the model got, from the events of `--json`."""
    events = [json.loads(line) for line in lines.splitlines()]
    return str(next(event["text"] for event in events if event.get("role") == "user"))


# --- text, wherever it comes from


@pytest.mark.parametrize(
    "data", [b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\ntwo", "one\ntwo\n".encode("utf-16"), b"one\rtwo"]
)
def test_text_is_the_same_from_a_pipe_a_file_and_a_name(data: bytes, here: Path) -> None:
    (here / "notes.txt").write_bytes(data)
    piped = run("ask", "--json", "What?", text=data.decode("utf-8", "surrogateescape"))
    assert asked(piped.stdout) == "one\ntwo\n\nWhat?"
    named = run("ask", "--json", "What?", "-f", "notes.txt", text="three")
    assert asked(named.stdout) == "```notes.txt\none\ntwo\n```\n\nthree\n\nWhat?"


def test_files_stand_in_their_order_and_one_that_is_no_text_is_refused(here: Path) -> None:
    for name, text in (("a.txt", "one"), ("b c.txt", "two"), ("x.tar", "a\0b")):
        (here / name).write_text(text, encoding="utf-8")
    told = asked(run("ask", "--json", "-f", "b c.txt", "--file", "a.txt", "What?").stdout)
    assert told == "```b c.txt\ntwo\n```\n\n```a.txt\none\n```\n\nWhat?"
    assert refused("ask", "-f", "x.tar", "What?") == (
        2, "sirchat: x.tar is not text: it contains NUL bytes\n",
    )  # fmt: skip
    assert "line 1: not text: it contains NUL bytes" in refused(text="a\0b\n")[1]


def test_a_file_named_in_the_question_is_said_to_be_plain_text(here: Path) -> None:
    (here / "notes.txt").write_text("one", encoding="utf-8")
    done = run("ask", "--json", "What is in @notes.txt? Or @none.txt?")
    assert asked(done.stdout) == "What is in @notes.txt? Or @none.txt?"
    assert done.stderr.startswith("@notes.txt is sent as plain text; to send the file")
    assert "none.txt" not in done.stderr
    assert "plain text" not in run("ask", "What is in @notes.txt?", "-f", "notes.txt").stderr


def test_a_lone_minus_is_standard_input() -> None:
    for arguments, told in (
        (["-"], "hi"),
        (["-", "What?"], "hi\n\nWhat?"),
        (["What?", "-f", "-"], "hi\n\nWhat?"),
        (["--no-input", "-"], "hi"),
        (["--", "- a\n- b"], "hi\n\n- a\n- b"),
        (["5", "-", "3"], "hi\n\n5 - 3"),
    ):
        assert asked(run("ask", "--json", *arguments, text="hi\n").stdout) == told
    code, said = refused("ask", "-", text="")
    assert (code, said.startswith("sirchat: there is no question")) == (2, True)
    saved_with_tiny("trip")
    assert run("sessions", "export", "trip", "-").stdout == run("sessions", "export", "trip").stdout


def test_at_a_terminal_a_lone_minus_is_what_is_typed(here: Path) -> None:
    with Terminal(WARM, "-m", "sirchat", "ask", "-", "--max-new-tokens=9", home=here) as typed:
        typed.send("My name is Anna.\rWhat is my name?\r\x04")
        typed.wait("Nice to meet you, Anna")
        assert typed.ended() == 0


def test_a_folder_and_a_quoted_pattern_are_listed_and_read(here: Path) -> None:
    for name in ("src/a.py", "src/b.py", "src/sub/c.md"):
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_text(f"in {name}", encoding="utf-8")
    done = run("ask", "--json", "-f", "src/*.py", "-f", "src/sub", "What?")
    names = ["src/a.py", "src/b.py", "src/sub/c.md"]
    blocks = [f"```{name}\nin {name}\n```" for name in names]
    assert asked(done.stdout) == "\n\n".join([*blocks, "What?"])
    listed = ["src/*.py: 2 files, src/a.py, src/b.py", "src/sub: 1 file, src/sub/c.md"]
    assert done.stderr.splitlines() == listed
    for named, told in (
        ("https://a.example/b", "(nothing is fetched; save the page as text)"),
        ("*.rs", "there is no file with text in *.rs"),
    ):
        assert told in refused("ask", "-f", named, "What?")[1]
    assert "standard input is a PDF, not text" in refused("ask", "What?", text="%PDF-1.7")[1]


# --- an open standard input


def test_it_says_that_it_waits_for_standard_input_and_how_not_to() -> None:
    command = [*warm_python(), "-m", "sirchat", "ask", "Hi.", "--max-new-tokens=2"]
    pipe = subprocess.PIPE
    ask_client = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert ask_client.stderr is not None
    told = ask_client.stderr.readline()
    assert told == (
        "waiting for standard input to end; < /dev/null, or --no-input, asks without it\n"
    )
    assert ask_client.communicate("Hello!", timeout=60)[0].strip()


def test_a_loop_over_the_lines_of_a_file_asks_each(here: Path) -> None:
    (here / "list").write_text("Hello!\nThank you!\nGood bye!\n", encoding="utf-8")
    loop = 'while read x; do {} "$x" --max-new-tokens=3; echo "[$x]"; done < list'
    done = shell(loop.format("sirchat ask"))
    assert done.stdout.count("[") == 3
    assert "is a file that a loop or another command reads" in done.stderr
    piped = f"cat list | {loop.format('sirchat ask --no-input').removesuffix('< list')}"
    assert shell(piped).stdout == done.stdout
