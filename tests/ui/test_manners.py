"""How the chat behaves under the user's hands: keys, pastes, interrupts, the terminal's state."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import DummyCompleter
from prompt_toolkit.history import DummyHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from sirchat.ui.interrupt import insistent
from sirchat.ui.prompt import Line, Prompt
from terminal import Shared, Terminal, pager_into

ESCAPE, ENTER, UP = "\x1b", "\r", "\x1b[A"
CTRL_C, CTRL_D, CTRL_R, CTRL_Z = "\x03", "\x04", "\x12", "\x1a"
NEW_LINES = {"Alt-Enter": "\x1b\r", "Ctrl-J": "\n", "a backslash": "\\\r"}


@pytest.fixture(scope="module")
def paged(home: Path) -> Path:
    """What the pager was given last."""
    return home / "paged"


@pytest.fixture(scope="module")
def shared(home: Path, paged: Path, endless: str) -> Iterator[Shared]:
    editor = home / "editor.sh"
    editor.write_text('#!/bin/sh\necho "and edited" >> "$1"\n', encoding="utf-8")
    editor.chmod(0o755)
    environ = {"PAGER": pager_into(paged), "EDITOR": str(editor), "VISUAL": ""}
    chats = Shared(lambda: Terminal("--model", endless, home=home, environ=environ))
    yield chats
    chats.close()


@pytest.fixture
def chat(shared: Shared) -> Terminal:
    """A chat whose replies are of three tokens."""
    chat = shared.anew()
    chat.ask("/set max_new_tokens 3")
    return chat


@pytest.fixture
def speaker(shared: Shared) -> Terminal:
    """A chat whose replies go on and on."""
    chat = shared.anew()
    chat.ask("/set max_new_tokens 100000")
    return chat


def _held(chat: Terminal, paged: Path) -> str:
    """The held tokens, one after the other."""
    chat.ask("/tokens")
    table = paged.read_text(encoding="utf-8") if "position" not in chat.shown else chat.shown
    table = re.sub(r"\x1b\[[\d;]*m", "", table)
    return "".join(re.findall(r'^ *\d+ +\d+ +\w+ +"(.*?)" +\d+ ', table, re.M))


def _message(chat: Terminal, turn: int = 0) -> str:
    """The user's text as the model got it in a turn."""
    table = chat.ask(f"/tokens turn {turn}")
    return "".join(re.findall(r'^ *\d+ +\d+ +you +"(.*?)" +\d+ ', table, re.M)).replace("⏎", "\n")


def _begin(chat: Terminal, message: str = "Go on.") -> None:
    """Send a message, and wait until the reply is well under way."""
    chat.say(message)
    chat.until(lambda: len(chat.shown) > 400)


# --- typing


@pytest.mark.parametrize("keys", NEW_LINES.values(), ids=NEW_LINES)
def test_enter_submits_and_these_keys_begin_a_new_line(chat: Terminal, keys: str) -> None:
    chat.wait_prompt()
    chat.send(f"one{keys}two{keys}three")
    chat.wait_screen(r"> one\n  two\n  three")
    chat.submit(ENTER)
    assert _message(chat) == "one\ntwo\nthree"


def test_a_block_in_triple_quotes_goes_over_several_enters(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send('"""one\r/reset\r\rtwo\\\rthree"""')
    chat.wait_screen(r'> """one\n  /reset\n\n  two\\\n  three"""')
    chat.submit(ENTER)
    assert _message(chat) == "one\n/reset\n\ntwo\\\nthree"


def test_up_recalls_and_the_history_is_private(chat: Terminal, home: Path) -> None:
    chat.ask("first words")
    chat.ask("second words")
    chat.send(UP)
    chat.wait_screen("> second words\n")
    chat.send(UP)
    chat.wait_screen("> first words\n(?!.*tok/s)")
    chat.send(CTRL_C)
    chat.wait_prompt()
    file = home / "state" / "history"
    assert "+second words" in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_ctrl_r_searches_what_was_typed(chat: Terminal) -> None:
    chat.ask("a needle in here")
    chat.ask("some hay")
    chat.send(CTRL_R + "needle")
    chat.wait_screen("I-search backward.*needle")
    chat.submit("\r\r")
    chat.wait_prompt()
    assert _message(chat, 4) == "a needle in here"


def test_ctrl_x_ctrl_e_opens_the_editor_and_its_text_comes_back(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send("typed\x18\x05")
    chat.wait_screen("(?m)^> typedand edited$")
    chat.send("!")
    chat.submit(ENTER)
    assert _message(chat) == "typedand edited!"


# --- pasting


def test_a_paste_of_several_lines_is_one_message_and_never_a_command(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.paste("/policy sink\r\n/reset\nand this\n")
    chat.wait_screen("pasted: sent as it is, never a command")
    chat.submit(ENTER)
    assert _message(chat) == "/policy sink\n/reset\nand this\n"
    assert " · entropy · " in chat.text


def test_a_pasted_command_is_a_message_too(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.paste("/reset")
    chat.wait_screen("> /reset")
    chat.submit(ENTER)
    assert _message(chat) == "/reset"


def test_a_paste_behind_typed_words_is_added_to_them(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send("see: ")
    chat.paste("one\n/two")
    chat.wait_screen("> see: one\n  /two")
    chat.submit(ENTER)
    assert _message(chat) == "see: one\n/two"


def test_what_is_pasted_cannot_steer_the_terminal(chat: Terminal) -> None:
    chat.wait_prompt()
    before = len(chat.raw)
    chat.paste("a\x1b]0;title\x07b\u202ec\x9bd")
    chat.wait_screen("> a·")
    chat.submit(ENTER)
    chat.wait_prompt()
    for control in (b"\x1b]0;title", b"\x07", "\u202e".encode(), "\x9b".encode()):
        assert control not in chat.raw[before:]


# --- stopping


@pytest.mark.parametrize("key", [CTRL_C, ESCAPE], ids=["Ctrl-C", "Esc"])
def test_a_key_stops_a_reply_and_keeps_it(speaker: Terminal, paged: Path, key: str) -> None:
    _begin(speaker)
    speaker.send(key)
    speaker.wait("interrupted")
    speaker.wait_prompt()
    words = re.findall(r"[a-z]{4,}", speaker.shown)[:20]
    held = _held(speaker, paged)
    assert sum(word in held for word in words) > 5
    _begin(speaker, "And then?")
    speaker.send(key)
    speaker.wait("interrupted")


def test_arrow_keys_do_not_stop_a_reply(speaker: Terminal) -> None:
    speaker.ask("/set max_new_tokens 1500")
    _begin(speaker)
    for key in ("A", "B", "C", "D", "H", "F", "3~"):
        speaker.send(f"\x1b[{key}")
    speaker.wait_prompt()
    assert " 1,500 out" in speaker.shown
    assert "cut at the length limit" in speaker.shown


def test_ctrl_c_at_an_empty_prompt_says_how_to_leave(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.submit(CTRL_C)
    chat.wait_prompt()
    assert chat.text.count("Ctrl-D or /exit leaves") == 1


def test_ctrl_c_empties_the_prompt_and_up_brings_it_back(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send("nearly lost")
    chat.wait_screen("> nearly lost")
    chat.send(CTRL_C)
    chat.wait_prompt()
    chat.send(UP)
    chat.wait_screen("> nearly lost")
    chat.send(CTRL_C)


def test_ctrl_c_while_a_long_message_is_read_stops_the_reading(chat: Terminal) -> None:
    chat.wait_prompt()
    text = " ".join(f"word{i}" for i in range(8000))
    chat.paste(text)
    chat.wait_screen("word7999")
    chat.submit(ENTER)
    chat.wait_screen(r"reading [█▏▎▍▌▋▊▉]* +[\d,]+ of [\d,]{6} tokens")
    chat.send(CTRL_C)
    chat.wait_prompt()
    read = re.search(r"([\d,]+) in, 0 out, .*interrupted", chat.text)
    assert read
    assert int(read[1].replace(",", "")) < 30_000  # of 38,895
    assert "reading" not in chat.text
    assert "3 out" in chat.ask("Hello.")


def test_at_any_moment_ctrl_c_leaves_a_well_formed_conversation(
    chat: Terminal, paged: Path
) -> None:
    moments = random.Random(7)
    chat.ask("/set max_new_tokens 200")
    chat.ask("/budget 4000")
    for _ in range(10):
        chat.wait_prompt()
        chat.send("one two three four five six seven eight nine ten " * moments.choice([1, 12]))
        chat.submit(ENTER)
        time.sleep(moments.uniform(0, 0.25))
        chat.send(CTRL_C)
        chat.wait_prompt()
    assert " 200 out" in chat.ask("Hello.")
    turns = re.split(r"<\|(?:user|assistant)\|>", _held(chat, paged))
    assert len(turns) == 1 + 2 * 11
    assert turns[0] == "<|bos|>"
    assert all(turn.count("<|end|>") == 1 and turn.endswith("<|end|>") for turn in turns[1:])


# --- typing ahead


def test_what_is_typed_ahead_is_in_the_next_prompt_and_not_in_the_reply(
    speaker: Terminal,
) -> None:
    _begin(speaker)
    speaker.send("zzqq")
    _later(speaker)
    assert b"zzqq" not in speaker.raw[-6000:]
    speaker.send(CTRL_C)
    speaker.wait_screen("(?m)^> zzqq$")
    assert speaker.everything.count("zzqq") == 1
    speaker.send(CTRL_C)


def test_a_line_typed_ahead_is_sent(speaker: Terminal) -> None:
    _begin(speaker)
    speaker.send("/budget 64\r")
    _later(speaker)
    speaker.send(CTRL_C)
    speaker.wait("budget: 1024 -> 64")
    speaker.wait_prompt()


def test_a_paste_ahead_stays_one_message(speaker: Terminal) -> None:
    _begin(speaker)
    speaker.paste("/reset\nzzqq")
    _later(speaker)
    speaker.send(ESCAPE)
    speaker.wait_screen("> /reset\n  zzqq")
    speaker.wait_screen("pasted: sent as it is, never a command")
    speaker.send(CTRL_C)


def _later(chat: Terminal) -> None:
    """Wait until the reply has gone on for a while."""
    before = len(chat.raw)
    chat.until(lambda: len(chat.raw) > before + 4000)


# --- errors


def test_an_error_in_a_turn_is_one_line_and_keeps_the_conversation(chat: Terminal) -> None:
    chat.ask("Hello.")
    chat.ask("/policy full")
    held = re.search(r"([\d,]+)/4,096 held", chat.text)
    assert held
    chat.wait_prompt()
    chat.paste("word " * 5000)
    chat.wait_screen("pasted")
    chat.submit(ENTER)
    chat.wait_prompt()
    assert "sirchat: " in chat.text.split("word")[-1]
    assert f"{held[1]}/4,096 held" in chat.text
    assert "3 out" in chat.ask("Hello again.")


# --- leaving, and what the terminal is like afterwards


class _Shell(Terminal):
    """A shell with job control, and a chat in it."""

    def __init__(self, folder: Path, model: str, program: str = "-m sirchat") -> None:
        flags = ("--norc", "--noprofile", "--noediting", "-i")
        super().__init__("bash", *flags, home=folder, environ={"PS1": "READY# "})
        self._folder = folder
        self.command(f"cd {folder}; stty -a > before")
        self.command(f"{sys.executable} {program} --model {model} --max-new-tokens 100000")

    def command(self, line: str) -> None:
        """Type a command line, at the shell's prompt."""
        self.wait_screen(r"READY#$")
        before = len(self.raw)
        self.send(f"clear; {line}\r")
        # Until the screen was cleared, behind the line's echo; the command may have ended by then.
        self.until(lambda: b"\x1b[" in self.raw[before:].partition(b"\n")[2])

    def signal(self, number: int) -> None:
        """Signal whatever runs in the foreground."""
        os.killpg(os.tcgetpgrp(self.child.child_fd), number)

    def code(self) -> int:
        """How the chat ended; whether it left the terminal as it found it."""
        self.wait_screen(r"READY#$")
        assert "Traceback" not in self.everything
        assert not self.screen.cursor.hidden
        assert self.raw.rfind(b"\x1b[?2004l") >= self.raw.rfind(b"\x1b[?2004h")
        self.send("echo code $?; stty -a > after\r")
        self.wait_screen(r"(?m)^code \d+\nREADY#$")
        before, after = (self._folder / name for name in ("before", "after"))
        assert after.read_text(encoding="utf-8") == before.read_text(encoding="utf-8")
        found = re.search(r"(?m)^code (\d+)$", self.text)
        return int(found[1]) if found else -1


@pytest.fixture
def shell(tmp_path: Path, endless: str) -> Iterator[_Shell]:
    if shutil.which("bash") is None or shutil.which("stty") is None:
        pytest.skip("no bash, or no stty")
    shell = _Shell(tmp_path, endless)
    with shell:
        yield shell


def test_ctrl_z_gives_the_terminal_back_and_takes_it_again(shell: _Shell) -> None:
    shell.wait_prompt()
    shell.send(CTRL_Z)
    shell.command("stty -a | diff - before && echo no difference")
    shell.wait_screen("no difference")
    shell.command("fg")
    shell.wait_prompt()
    _begin(shell)
    shell.send(CTRL_Z)
    shell.wait_screen("READY#$")
    assert not shell.screen.cursor.hidden
    assert shell.raw.rfind(b"\x1b[?2004l") > shell.raw.rfind(b"\x1b[?2004h")
    shell.command("stty -a | diff - before && echo no difference")
    shell.wait_screen("no difference")
    shell.command("fg")
    shell.settle(0.2)
    shell.send("zzqq")
    _later(shell)
    assert b"zzqq" not in shell.raw
    for _ in range(3):
        shell.send(CTRL_C)
    shell.wait_screen("(?m)^> zzqq$")
    shell.send(CTRL_C)
    shell.wait_prompt()
    shell.send(CTRL_D)
    assert shell.code() == 0


def test_a_bar_shows_the_loading_and_leaves_nothing_behind_and_exit_leaves(
    shell: _Shell, endless: str
) -> None:
    shell.wait_screen(rf"^loading {endless} ")
    shell.wait_prompt()
    assert shell.lines[0].startswith(f"{endless}, policy entropy")
    shell.say("/exit")
    assert shell.code() == 0


def test_sigterm_ends_a_reply(shell: _Shell) -> None:
    _begin(shell)
    shell.signal(signal.SIGTERM)
    assert shell.code() == 128 + signal.SIGTERM


def test_sigterm_ends_a_prompt(shell: _Shell) -> None:
    shell.wait_prompt()
    shell.signal(signal.SIGTERM)
    assert shell.code() == 128 + signal.SIGTERM


def test_ctrl_c_ends_the_loading(tmp_path: Path, endless: str) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\nimport sirchat.__main__ as program\nimport sirchat.models.model as model\n"
        "model.load_model = lambda *args, **options: time.sleep(600)\nprogram.main()\n"
    )
    shell = _Shell(tmp_path, endless, str(slow))
    with shell:
        shell.wait_screen(r"(?m)^loading ")
        shell.send(CTRL_C)
        assert shell.code() == 130
        assert "loading" not in shell.text


def test_an_interrupt_that_an_import_swallows_is_raised_behind_it() -> None:
    with pytest.raises(KeyboardInterrupt), insistent(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_model_that_is_missing_costs_one_line(tmp_path: Path) -> None:
    with Terminal("--model", "./no-such-model", home=tmp_path) as chat:
        assert chat.ended() == 1
        line = " ".join(chat.text.split())
        assert re.fullmatch(r"sirchat: [^:]*no-such-model.*\(.*\)", line)
        assert not chat.screen.cursor.hidden


# --- what a first version got wrong


def test_an_empty_paste_is_none_and_a_paste_edited_away_neither(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.paste("")
    assert "turns" in chat.ask("/stats")
    chat.wait_prompt()
    chat.paste("/")
    chat.send("\x7f")
    assert "turns" in chat.ask("/stats")


def test_quotes_around_nothing_say_nothing_and_text_may_follow_a_block(chat: Terminal) -> None:
    chat.ask("/reset")
    chat.wait_prompt()
    chat.send('""""""' + ENTER)
    chat.settle()
    assert " 0/" in chat.lines[-1]
    assert " out" in chat.ask('"""hi""" he said')


def test_the_toolbar_follows_the_theme(chat: Terminal) -> None:
    chat.ask("/set theme none")
    chat.settle()
    before = len(chat.raw)
    chat.ask("/stats")
    chat.settle()
    assert b"\x1b[0;90m" not in chat.raw[before:]
    chat.ask("/set theme auto")


def test_a_history_that_can_no_longer_be_written_is_done_without(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.wait_prompt()
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").write_text("in the way", encoding="utf-8")
        assert "turns" in chat.ask("/stats")
        assert "turns" in chat.ask("/stats")
        assert "Exception" not in chat.everything
        assert chat.leave() == 0


def test_ctrl_c_in_the_pager_is_the_pagers_own(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    waits = "trap 'echo caught; exit' INT; echo here; while :; do sleep 1; done"
    pager.write_text(f"#!/bin/sh\n{waits}\n", encoding="utf-8")
    pager.chmod(0o700)
    with Terminal(home=tmp_path, environ={"PAGER": str(pager)}, rows=14) as chat:
        chat.say("/set")
        chat.wait("here")
        chat.send(CTRL_C)
        chat.wait("caught")
        chat.wait_prompt()
        assert chat.leave() == 0


def test_a_pager_that_cannot_be_started_costs_nothing(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("no program")
    pager.chmod(0o700)
    with Terminal(home=tmp_path, environ={"PAGER": str(pager)}, rows=14) as chat:
        assert "max_new_tokens" in chat.ask("/set")
        assert chat.leave() == 0


def test_a_line_is_not_lost_to_ctrl_c_as_the_prompt_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_pipe_input() as keys:
        prompt = Prompt(
            keys, DummyOutput(), completer=DummyCompleter(), toolbar=str, history=DummyHistory()
        )
        closes = PromptSession.prompt

        def closed_too_late(self: Any, *args: Any, **options: Any) -> Any:
            closes(self, *args, **options)
            raise KeyboardInterrupt

        keys.send_text("Hello.\r")
        assert prompt.read() == Line("Hello.", is_command=False)
        monkeypatch.setattr(PromptSession, "prompt", closed_too_late)
        keys.send_text("Hello.\r")
        assert prompt.read() == Line("Hello.", is_command=False, is_stopped=True)
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            prompt.read()
