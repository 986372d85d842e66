"""The terminal's state after the chat is suspended, ended or killed, and while a pager runs."""

from __future__ import annotations

import atexit
import io
import os
import re
import select
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fake_terminal import FakeTerminal, show_reply
from sirchat.ui.interrupt import defer_signals, interruptible_imports
from sirchat.ui.keys import TerminalKeys
from sirchat.ui.typed_input import Keyboard
from terminal import Terminal, program
from warm_python import warm_python

pytestmark = pytest.mark.slow

CTRL_C, CTRL_D, CTRL_Z, CTRL_BACKSLASH = "\x03", "\x04", "\x1a", "\x1c"


class _Shell(Terminal):
    """A shell with job control that runs a chat: `python PROGRAM`."""

    def __init__(self, folder: Path, model: str, *python: str, program: str = "-m sirchat") -> None:
        flags = ("--norc", "--noprofile", "--noediting", "-i")
        super().__init__("bash", *flags, home=folder, environ={"PS1": "READY# "})
        self._folder = folder
        self.command(f"cd {folder}; stty -a > before")
        begun = " ".join(python or (sys.executable,))
        self.command(f"{begun} {program} --model {model} --max-new-tokens 100000")

    def command(self, line: str) -> None:
        """Type a command line, at the shell's prompt."""
        self.wait_screen(r"READY#$")
        before = len(self.raw)
        self.send(f"clear; {line}\r")
        # Until the screen was cleared, after the line's echo; the command may have ended by then.
        self.until(lambda: b"\x1b[" in self.raw[before:].partition(b"\n")[2])

    def signal(self, number: int) -> None:
        """Signal whatever runs in the foreground."""
        os.killpg(self.child.foreground, number)

    def code(self) -> int:
        """The chat's exit code; asserts that it restored the terminal."""
        self.wait_screen(r"READY#$")
        assert "Traceback" not in self.everything
        assert not self.screen.cursor.hidden
        assert self.raw.rfind(b"\x1b[?2004l") >= self.raw.rfind(b"\x1b[?2004h")
        self.send("echo code $?; stty -a > after\r")
        self.wait_screen(r"(?m)^code \d+\nREADY#$")
        before, after = (self._folder / name for name in ("before", "after"))
        assert after.read_text(encoding="utf-8") == before.read_text(encoding="utf-8")
        match = re.search(r"(?m)^code (\d+)$", self.text)
        return int(match[1]) if match else -1


@pytest.fixture
def has_shell() -> None:
    if shutil.which("bash") is None or shutil.which("stty") is None:
        pytest.skip("no bash, or no stty")


@pytest.fixture
def warm_shell(tmp_path: Path, endless: str, has_shell: None) -> Iterator[_Shell]:
    """Its chat starts fast; the shell has job control over what stands in for it."""
    with _Shell(tmp_path, endless, *warm_python()) as shell:
        yield shell


def test_the_first_message_is_edited_by_the_keys_that_are_set(tmp_path: Path, endless: str) -> None:
    flags = ("--model", endless, "--max-new-tokens", "3", "--editing", "vi")
    with Terminal(*flags, home=tmp_path) as chat:
        chat.wait_prompt()
        for keys, mode in (("xhello", "insert"), ("\x1b", "normal")):
            chat.send(keys)
            chat.wait_screen(rf"(?m)^ {mode} · ")
        chat.send("0x\r")
        chat.wait_screen("(?m)^> hello$")


def test_ctrl_z_gives_the_terminal_back_and_takes_it_again(
    tmp_path: Path, endless: str, has_shell: None
) -> None:
    with _Shell(tmp_path, endless, sys.executable) as shell:
        _suspend_at_the_prompt(shell)
        _suspend_a_reply(shell)
        shell.send(CTRL_D)
        assert shell.code() == 0


def _suspend_at_the_prompt(shell: _Shell) -> None:
    shell.wait_prompt()
    shell.send("some words" + CTRL_Z)
    shell.command("stty -a | diff - before && echo no difference")
    shell.wait_screen("no difference")
    shell.command("fg")
    shell.wait_screen("(?m)^> some words$")
    shell.send(CTRL_C)
    shell.wait_prompt()


def _suspend_a_reply(shell: _Shell) -> None:
    shell.begin_reply()
    shell.send(CTRL_Z)
    shell.wait_screen("READY#$")
    assert not shell.screen.cursor.hidden
    assert shell.raw.rfind(b"\x1b[?2004l") > shell.raw.rfind(b"\x1b[?2004h")
    shell.command("stty -a | diff - before && echo no difference")
    shell.wait_screen("no difference")
    shell.command("fg")
    shell.settle(0.2)
    shell.send("zzqq")
    shell.read_on()
    assert b"zzqq" not in shell.raw
    for _ in range(3):
        shell.send(CTRL_C)
    shell.wait_screen("(?m)^> zzqq$")
    shell.send(CTRL_C)
    shell.wait_prompt()


@pytest.mark.parametrize(
    ("begin", "number"),
    [
        (_Shell.begin_reply, signal.SIGTERM),
        (_Shell.wait_prompt, signal.SIGTERM),
        (_Shell.begin_reply, signal.SIGQUIT),
    ],
    ids=["reply", "prompt", "Ctrl-Backslash"],
)
def test_a_signal_ends_a_reply_and_a_prompt(
    warm_shell: _Shell, begin: Callable[[_Shell], object], number: int
) -> None:
    begin(warm_shell)
    if number == signal.SIGQUIT:
        warm_shell.send(CTRL_BACKSLASH)
    else:
        warm_shell.signal(number)
    assert warm_shell.code() == 128 + number


def test_ctrl_c_in_the_pager_goes_to_the_pager(tmp_path: Path) -> None:
    waits = "trap 'echo caught; exit' INT; echo here; while :; do sleep 1; done"
    pager = program(tmp_path / "pager", waits)
    with Terminal(home=tmp_path, environ={"PAGER": pager}, rows=14) as chat:
        chat.say("/set")
        chat.wait("here")
        chat.send(CTRL_C)
        chat.wait("caught")
        assert chat.leave() == 0


@pytest.mark.usefixtures("has_shell")
@pytest.mark.parametrize(
    ("key", "python"),
    [(CTRL_Z, lambda: ()), (CTRL_BACKSLASH, warm_python)],
    ids=["Ctrl-Z", "Ctrl-Backslash"],
)
def test_a_progress_bar_that_is_left_shows_the_cursor(
    tmp_path: Path, endless: str, key: str, python: Callable[[], Sequence[str]]
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\nimport sirchat.__main__ as program\nimport sirchat.models.load as load\n"
        "load.load_model = lambda *args, **options: time.sleep(600)\nprogram.main()\n"
    )
    with _Shell(tmp_path, endless, *python(), program=f"{slow} ask hi") as shell:
        shell.until(lambda: shell.screen.cursor.hidden)
        shell.send(key)
        shell.wait_screen(r"READY#$")
        assert not shell.screen.cursor.hidden
        assert "Traceback" not in shell.everything


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("frame", [0, 1, 3])
@pytest.mark.usefixtures("every_frame")
def test_a_signal_in_the_midst_of_a_frame_leaves_none_of_it_on_the_screen(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, number: int, frame: int
) -> None:
    usual, frames = FakeTerminal.write, 0

    def write(self: FakeTerminal, text: str) -> int:
        nonlocal frames
        frames += "\x1b[?2026h" in text
        if frames == frame + 1 and "\x1b[?2026h" in text:
            at = text.index("held") + 2
            usual(self, text[:at])
            signal.raise_signal(number)
            return usual(self, text[at:])
        return usual(self, text)

    def end(*_: object) -> None:
        raise SystemExit(7)

    monkeypatch.setattr(FakeTerminal, "write", write)
    before = signal.signal(number, end)
    try:
        with pytest.raises(SystemExit):
            show_reply(terminal, ["word "] * 6)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    assert [line.strip() for line in terminal.screen.display if line.strip()] == [
        " ".join(["word"] * (frame + 1))
    ]
    assert not terminal.screen.cursor.hidden


def test_the_second_signal_ends_a_program_whose_terminal_takes_no_output() -> None:
    ended = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            assert not ended
            signal.raise_signal(signal.SIGTERM)
            assert len(ended) == 1
        assert len(ended) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_that_an_import_swallows_is_raised_after_it() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible_imports(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def read_up_to(side: int, end: bytes) -> bytes:
    """What comes out of one side of a pseudo-terminal, which takes a moment, until it has `end`."""
    read = b""
    while end not in read and select.select([side], [], [], 10)[0]:
        read += os.read(side, 100)
    return read


def test_ctrl_c_drops_nothing_that_is_on_its_way() -> None:
    """A frame of which a part was dropped left the panel on the screen."""
    terminal, program = os.openpty()
    with open(program, encoding="utf-8") as line, Keyboard(TerminalKeys(line)):
        os.write(program, b"a frame")
        os.write(terminal, b"next\x03")
        assert read_up_to(terminal, b"frame") == b"a frame"
        assert read_up_to(program, b"next") == b"next"
    os.close(terminal)


@pytest.mark.parametrize("within", ["__enter__", "__exit__"])
def test_a_signal_as_the_keyboard_is_entered_or_left_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    def end(*_: object) -> None:
        sys.exit(143)

    terminal, program = os.openpty()
    at_exit = list[Callable[[], object]]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    with open(program, encoding="utf-8") as line:
        before, keys = termios.tcgetattr(line), TerminalKeys(line)
        monkeypatch.setattr(Keyboard, "__exit__", end)
        if within == "__enter__":
            monkeypatch.setattr(keys, "read_keys", end)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit), Keyboard(keys):
            pass
        assert termios.tcgetattr(line) != before
        at_exit[-1]()
        assert termios.tcgetattr(line) == before
    os.close(terminal)


class _Suspending(io.FileIO):
    """A terminal at which Ctrl-Z comes while the program writes to it."""

    keyboard: Keyboard

    def write(self, data: object) -> int:
        self.keyboard._suspend(signal.SIGTSTP, None)
        return super().write(data)  # type: ignore[arg-type]


def test_ctrl_z_while_a_frame_is_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: stopped.append(number))
    terminal, program = os.openpty()
    raw = _Suspending(os.dup(program), "w")
    with (
        io.TextIOWrapper(io.BufferedWriter(raw)) as out,
        open(program, encoding="utf-8") as line,
        Keyboard(TerminalKeys(line), out) as raw.keyboard,
    ):
        out.write("a frame")
        out.flush()
        assert read_up_to(terminal, b"frame").endswith(b"\x1b[Ja frame")
        raw.close()
    os.close(terminal)
    assert stopped == [signal.SIGTSTP]
