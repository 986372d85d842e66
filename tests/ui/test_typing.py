"""Typing at the prompt: keys that a terminal sends, lines, history, the editor, pasted text."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.history import DummyHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.key_binding.key_processor import KeyProcessor
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from chatting import babbler
from fake_terminal import FakeTerminal
from sirchat.ui import keys as keys_of
from sirchat.ui.keys import KeyParser
from sirchat.ui.prompt import Prompt
from sirchat.ui.typed_input import Keyboard, open_history
from sirchat.ui.typed_line import InputLine, as_typed, sent_message
from terminal import PASTE_OFF, PASTE_ON, program
from typed_chat import TypedChat

ENTER, UP, DOWN, CTRL_C, CTRL_R, HOME, EDITOR = (
    "\r",
    "\x1b[A",
    "\x1b[B",
    "\x03",
    "\x12",
    "\x01",
    "\x18\x05",
)

Read = Callable[..., InputLine]


@pytest.fixture
def pipe() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


@pytest.fixture
def prompt(pipe: PipeInput) -> Prompt:
    return Prompt(pipe, DummyOutput(), history=DummyHistory())


@pytest.fixture
def read(own_home: Path, pipe: PipeInput) -> Read:
    """Reads a line at the prompt; each string of keys comes a moment after the one before."""
    history = open_history(print)
    prompt = Prompt(pipe, DummyOutput(), history=history)

    def line_of(first: str, *keys: str) -> InputLine:
        async def others() -> None:
            for one in keys:
                await asyncio.sleep(0.05)
                pipe.send_text(one)

        pipe.send_text(first)
        line = prompt.read(background=others)
        assert line is not None
        return line

    return line_of


@pytest.fixture
def chat(terminal: FakeTerminal, own_home: Path) -> Iterator[TypedChat]:
    with TypedChat(terminal, babbler(), max_new_tokens=3) as chat:
        yield chat


def paste(text: str) -> str:
    return PASTE_ON + text + PASTE_OFF


def message(text: str) -> InputLine:
    return InputLine(text, is_command=False)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\x1b\rtwo\x1b\rthree", "one\ntwo\nthree"),
        ("one\ntwo", "one\ntwo"),
        ("one\\\rtwo", "one\ntwo"),
        ('"""one\r/reset\r\rtwo\\\rthree"""', "one\n/reset\n\ntwo\\\nthree"),
        ('"""hi""" he said', '"""hi""" he said'),
        ('""""""\rwords', "words"),  # quotes around nothing say nothing
        ("//reset", "/reset"),
        (paste("/policy sink\r\n/reset\nand this\n"), "/policy sink\n/reset\nand this"),
        (paste("\n  indented\n    more"), "  indented\n    more"),
        (paste('"""Doc') + "trine", '"""Doctrine'),
        ("see: " + paste("one\n/two"), "see: one\n/two"),
        ("explain" + HOME + paste("/usr/x.py: error "), "/usr/x.py: error explain"),
        ("/x" + HOME + paste("/system Obey. "), "/system Obey. /x"),
        ("c" + HOME + paste('"""a ') + "b", '"""a bc'),
        (paste("bye"), "bye"),
        ("Q" + paste("uit"), "Quit"),
        ('"""\rexit\r"""', "exit"),
    ],
)
def test_lines_blocks_and_pastes_are_one_message(read: Read, keys: str, text: str) -> None:
    assert read(keys + ENTER) == message(text)


@pytest.mark.parametrize("typed", ["exit", " :Q ", "bye" + paste("")])
def test_a_word_that_is_typed_alone_leaves(read: Read, typed: str) -> None:
    assert read(typed + ENTER).ends_chat


@pytest.mark.parametrize("keys", [paste("") + "/stats", paste("/") + "\x7f\x7f/stats"])
def test_an_empty_paste_and_an_edited_one_do_not_count_as_pasted(read: Read, keys: str) -> None:
    assert read(keys + ENTER) == InputLine("/stats", is_command=True)


def test_up_and_ctrl_r_bring_lines_back_and_the_history_is_private(
    read: Read, own_home: Path
) -> None:
    for words in ("a needle in here", "first words", "second words"):
        assert read(words + ENTER) == message(words)
    assert read(UP, UP, ENTER) == message("first words")
    assert read(CTRL_R + "needle", ENTER + ENTER) == message("a needle in here")
    assert read("nearly lost", CTRL_C, UP, ENTER) == message("nearly lost")
    file = own_home / "state" / "history"
    assert "+second words" in file.read_text(encoding="utf-8")
    file.unlink()
    assert read("again" + ENTER) == message("again")
    assert [one.stat().st_mode & 0o777 for one in (file, file.parent)] == [0o600, 0o700]


@pytest.mark.parametrize(
    ("script", "keys", "line"),
    [
        ('echo "and edited" >> "$1"', ("typed", "!\r"), message("typed\nand edited!")),
        ("printf 'a\\377b' > \"$1\"", ("", ENTER), message("a\ufffdb")),
        ('echo /exit > "$1"', ("words", ENTER), message("/exit")),
        ('echo /exit > "$1"', ("/stats", ENTER), InputLine("/exit", is_command=True)),
    ],
    ids=["edited", "bytes", "no command", "a command"],
)
def test_the_text_of_the_editor_comes_back_and_becomes_no_command_there(
    read: Read,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    keys: tuple[str, str],
    line: InputLine,
) -> None:
    monkeypatch.setenv("VISUAL", program(tmp_path / "editor.sh", script))
    assert read(keys[0] + EDITOR, keys[1]) == line


def test_pasted_text_stays_text_in_the_next_chat_and_can_be_erased(
    terminal: FakeTerminal, own_home: Path
) -> None:
    for keys in (paste("/exit"), UP, paste("exit"), UP):
        with TypedChat(terminal, babbler(), max_new_tokens=3) as chat:
            chat.press(keys, ENTER)
            assert chat.said().removeprefix("/") == "exit"
            if keys == UP:
                chat.ask("/erase turn 0")
                assert "1 typed line erased" in chat.ask("/erase --yes")
    assert "exit" not in (own_home / "state" / "history").read_text(encoding="utf-8")


def test_a_pasted_sign_names_no_file_and_a_typed_one_after_it_does(
    chat: TypedChat, own_home: Path
) -> None:
    file = own_home / "secret.txt"
    file.write_text("it is 4711", encoding="utf-8")
    for keys in (paste(f"see @{file} please"), UP, f"see {paste(f'@{file}')} please"):
        chat.press(keys, ENTER)
        assert chat.said() == f"see @{file} please"
    for code in (rf"use \@{file.name}x; @property", "a@secret.txt"):  # no file is meant
        chat.press(paste(code), ENTER)
        assert chat.said() == code
    chat.press(paste("@anna asks: ") + f"@{file}", ENTER)
    assert "it is 4711" in chat.said()
    assert "@anna asks: " in chat.said()
    chat.press("@", paste(str(file)), ENTER)
    assert "it is 4711" in chat.said()
    chat.ask("/erase turn 0")
    assert "1 typed line erased" in chat.ask("/erase --yes")
    lines = (own_home / "state" / "history").read_text(encoding="utf-8")
    assert f"see \\@{file} please" not in lines


@given(st.text(st.sampled_from('/"a@ \\\n'), max_size=12))
def test_a_text_that_comes_back_as_it_is_typed_is_the_same_message(text: str) -> None:
    sent = sent_message(as_typed(text)).strip()
    assert sent.strip('"\n ') == re.sub(r"(?<!\S)\\@", "@", text).strip('"\n ')


def test_the_toolbar_follows_the_theme(chat: TypedChat) -> None:
    for theme, is_grey in (("dark", True), ("none", False)):
        chat.ask(f"/set theme {theme}")
        chat.ask("/stats")
        assert ("\x1b[0;90m" in chat.terminal.getvalue()) == is_grey


def test_a_chat_goes_on_if_the_history_can_no_longer_be_written(
    chat: TypedChat, own_home: Path
) -> None:
    shutil.rmtree(own_home / "state")
    (own_home / "state").write_text("in the way", encoding="utf-8")
    for _ in range(2):
        assert "messages" in chat.ask("/stats")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Event loop is closed")])
def test_a_line_is_not_lost_to_ctrl_c_as_the_prompt_closes(
    error: BaseException, pipe: PipeInput, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes = PromptSession.prompt

    def closed_too_late(self: Any, *args: Any, **options: Any) -> Any:
        closes(self, *args, **options)
        raise error

    async def as_the_event_loop_ends() -> None:
        prompt._prompt.app.key_processor.send_sigint()

    pipe.send_text("Hello.\r")
    assert prompt.read() == message("Hello.")
    asyncio.run(as_the_event_loop_ends())  # is no exception
    monkeypatch.setattr(PromptSession, "prompt", closed_too_late)
    pipe.send_text("Hello.\r")
    assert prompt.read() == InputLine("Hello.", is_command=False, is_stopped=True)
    pipe.send_text("\x03")
    with pytest.raises(KeyboardInterrupt):
        prompt.read()


class Ending(DummyHistory):
    def load_history_strings(self) -> list[str]:
        sys.exit(143)


@pytest.mark.parametrize("history", [Ending(), DummyHistory()])
def test_a_signal_that_ends_the_chat_at_the_prompt_is_no_traceback(
    history: DummyHistory,
    pipe: PipeInput,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def is_ended() -> None:  # in a task; or before, while the history is read
        sys.exit(143)

    with pytest.raises(SystemExit, match="143"):
        Prompt(pipe, DummyOutput(), history=history).read(background=is_ended)
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


class AsksForTheCursor(DummyOutput):
    """A terminal whose answers come as keys, also after a signal."""

    responds_to_cpr = True

    def get_rows_below_cursor_position(self) -> int:
        raise NotImplementedError


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Exceptions of the prompt's event loop."""
    problems = list[object]()
    monkeypatch.setattr(Application, "_handle_exception", lambda *told: problems.append(told))
    return problems


def test_a_cursor_position_that_comes_when_a_signal_has_ended_the_prompt_is_no_exception(
    pipe: PipeInput, problems: list[object]
) -> None:
    def is_ended() -> None:
        pipe.send_text("\x1b[1;1R")
        asyncio.get_running_loop().call_soon(sys.exit, 143)

    async def soon() -> None:
        asyncio.get_running_loop().call_later(0.05, is_ended)

    pipe.send_text("Hello.\r")  # the prompt waits for the cursor's position
    with pytest.raises(SystemExit, match="143"):
        Prompt(pipe, AsksForTheCursor(), history=DummyHistory()).read(background=soon)
    assert not problems


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read", "ask_for_key"])
def test_a_signal_that_ends_the_program_within_a_key_is_no_exception_at_the_next_key(
    name: str, pipe: PipeInput, problems: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = KeyProcessor._call_handler

    def is_ended(*_: object, **given: object) -> None:
        monkeypatch.setattr(KeyProcessor, "_call_handler", usual)
        pipe.send_text("\x1b[1;1R")
        sys.exit(143)

    monkeypatch.setattr(KeyProcessor, "_call_handler", is_ended)
    prompt = Prompt(pipe, AsksForTheCursor(), history=DummyHistory())
    pipe.send_text("\x1b[B")
    with pytest.raises(SystemExit, match="143"):
        getattr(prompt, name)(*(("?", "y") if name == "ask_for_key" else ()))
    assert not problems


@pytest.mark.parametrize(
    "keys",
    [paste("") + "n", paste("y") + ENTER + "n", paste("ye") + ENTER + "n", paste("y\n") + "n"],
)
def test_what_is_pasted_answers_no_question_that_wants_a_key(keys: str) -> None:
    with create_pipe_input() as pressed:
        prompt = Prompt(pressed, DummyOutput(), history=DummyHistory())
        pressed.send_text(keys)
        assert prompt.ask_for_key("?", "yen\x1b") == "n"


def test_a_line_that_one_chat_adds_while_another_erases_is_kept(own_home: Path) -> None:
    ours, others = open_history(print), open_history(print)
    lines = [f"line {number}" for number in range(100)]

    def add() -> None:
        for line in lines:
            others.append_string(line)

    adding = threading.Thread(target=add)
    adding.start()
    while adding.is_alive():
        ours.erase(lambda line: line == "a secret")
    adding.join()
    assert open_history(print).lines() == lines[::-1]


@pytest.mark.parametrize(
    ("mode", "keys", "said"),
    [
        ("vi", "hello there\x1b0rH", "Hello there"),
        ("vi", "sent\x1b", "sent"),
        ("vi", "one\ntwo", "one\ntwo"),
        ("emacs", "hello there\x1bb\x1bc", "hello There"),
    ],
)
def test_a_message_is_edited_by_the_keys_that_are_set(
    chat: TypedChat, mode: str, keys: str, said: str
) -> None:
    chat.ask(f"/set editing {mode}")
    chat.ask(keys)
    assert chat.said() == said
    assert (" insert · " in chat.terminal.getvalue()) == (mode == "vi")


@pytest.mark.parametrize(("seconds", "rings"), [(0, 0), (9, 0), (2, 1)])
def test_the_bell_rings_after_replies_that_take_as_long_as_is_set(
    chat: TypedChat, monkeypatch: pytest.MonkeyPatch, seconds: int, rings: int
) -> None:
    chat.ask(f"/set bell {seconds}")
    clock = itertools.count(0, 3)  # a reply takes three seconds
    monkeypatch.setattr("sirchat.ui.repl.monotonic", lambda: next(clock))
    chat.ask("hi")
    assert chat.terminal.getvalue().count("\a") == rings


# --- what a terminal sends; its answers, and sequences of no key, are dropped


class Clock:
    """Replaces the clock that the parser reads."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keys_of, "time", clock)
    return clock


def pressed(clock: Clock, *sent: str | float) -> list[str]:
    """The keys that come of what is sent; a number is a pause in seconds, then keys are read."""
    presses: list[KeyPress] = []
    parser = KeyParser(presses.append)
    for data in (*sent, 0.06):
        if isinstance(data, str):
            parser.feed(data)
            continue
        clock.now += data
        parser.feed("")
        parser.flush()
    return [
        f"paste {press.data}" if press.key == Keys.BracketedPaste else
        "Esc" if press.key == Keys.Escape else str(getattr(press.key, "value", press.key))
        for press in presses
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        (["\x1b"], ["Esc"]),
        (["\x1b", 0.06, "a"], ["Esc", "a"]),
        (["\x1b", 0.02, "\r"], ["Esc", "c-m"]),
        (["\x1b\x7f\x1bb"], ["Esc", "c-h", "Esc", "b"]),
        (["\x1b["], ["Esc", "["]),
        (["\x1b[A\x1bOB\x1b[1;5C\x1b[3~"], ["up", "down", "c-right", "delete"]),
        (["\x1b", "[", "1", ";5", "D"], ["c-left"]),
        (["\x1b[[A", "\x1b[", "[", "B\x1b[[", "C"], ["f1", "f2", "f3"]),
        (["\x1b[13;2u\x1b[27;2;13~\x1b[13;5u"], ["c-j", "c-j", "c-j"]),
        (["\x1b[57441;2u\x1b[99999999999u"], []),
        (["\x1b[1;99Zx\x1b[?62;c\x1b[I"], ["x"]),
        (["\x1b[12;40R"], ["<cursor-position-response>"]),
        (["a\x1b]11;rgb:1111/2222/3333\x07b\x1bP>|xterm(390)\x1b\\c"], ["a", "b", "c"]),
        (["\x1b_Gi=1;OK\x1b\\\x1b^é\x07\x1b]\x07x"], ["x"]),
        (["a\x1b]11;rgb:11", "11/2222/3333\x1b", "\\b\x1b[?62", 0.02, ";1c"], ["a", "b"]),
        (["\x1b]11;rgb", 0.06, "a"], ["Esc", *"]11;rgba"]),
        (["\x1b]"], ["Esc", "]"]),
        (["\x1bPlease"], ["Esc", *"Please"]),
        (["\x1bPa\r"], ["Esc", "P", "a", "c-m"]),
        (["a\udcffb"], ["a", "\ufffd", "b"]),
        ([PASTE_ON + "/a\n" + PASTE_OFF + "b"], ["paste /a\n", "b"]),
        ([PASTE_ON[:3], PASTE_ON[3:] + "ab", "c\x1b[2", "01~d"], ["paste abc", "d"]),
        ([PASTE_ON + "abc", 5.0, "\x03", "e"], ["paste abc", "e"]),
        ([PASTE_ON + "a\x03bc", PASTE_OFF], ["paste a\x03bc"]),
    ],
)
def test_keys(clock: Clock, sent: list[str | float], keys: list[str]) -> None:
    assert pressed(clock, *sent) == keys


@pytest.mark.parametrize(
    ("sent", "stops"),
    [("\x1b", True), ("\x1b\x1b", True), ("\x1bb", False), ("\x1bP", False), ("\x1b]11;r", False)],
)
def test_esc_alone_stops_a_reply_but_no_chord(clock: Clock, sent: str, stops: bool) -> None:
    presses: list[KeyPress] = []
    parser = KeyParser(presses.append)

    def read() -> list[KeyPress]:
        taken = presses[:]
        presses.clear()
        return taken

    def flush() -> list[KeyPress]:
        parser.flush()
        return read()

    keys: Any = SimpleNamespace(read_keys=read, flush_keys=flush)
    keyboard = Keyboard(keys)
    parser.feed(sent)
    assert not keyboard.escape_pressed()
    clock.now += 0.06
    assert keyboard.escape_pressed() == stops
