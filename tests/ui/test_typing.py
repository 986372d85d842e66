"""Typing at the prompt: lines, history, the editor, and pasted text."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.history import DummyHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.key_binding.key_processor import KeyProcessor
from prompt_toolkit.output import DummyOutput

from sirchat.ui.pasted import PastedSigns
from sirchat.ui.prompt import Line, Prompt
from terminal import Shared, Terminal, program

ENTER, UP, CTRL_C, CTRL_R = "\r", "\x1b[A", "\x03", "\x12"
NEW_LINES = {"Alt-Enter": "\x1b\r", "Ctrl-J": "\n", "a backslash": "\\\r"}


@pytest.fixture(scope="module")
def shared(home: Path, endless: str) -> Iterator[Shared]:
    editor = program(home / "editor.sh", 'echo "and edited" >> "$1"')
    environ = {"EDITOR": editor, "VISUAL": ""}
    with Shared(lambda: Terminal("--model", endless, home=home, environ=environ)) as chats:
        yield chats


@pytest.fixture
def chat(shared: Shared) -> Terminal:
    """A chat whose replies are of three tokens."""
    chat = shared.anew()
    chat.ask("/set max_new_tokens 3")
    return chat


def _message(chat: Terminal, turn: int = 0) -> str:
    """The user's text in a turn, as the model read it."""
    table = chat.ask(f"/tokens turn {turn}")
    return "".join(re.findall(r'^ *\d+ +\d+ +you +"(.*?)" +\d+ ', table, re.M)).replace("⏎", "\n")


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
    chat.wait_screen("(?m)^> typed\n  and edited$")
    chat.send("!")
    chat.submit(ENTER)
    assert _message(chat) == "typed\nand edited!"


@pytest.mark.parametrize("text", ["/policy sink\r\n/reset\nand this\n", "/reset"])
def test_a_paste_is_one_message_and_never_a_command(chat: Terminal, text: str) -> None:
    chat.wait_prompt()
    chat.paste(text)
    chat.wait_screen("pasted text: sent as it is, never run as a command")
    chat.submit(ENTER)
    assert _message(chat) == text.replace("\r", "")
    assert " · salience · " in chat.text


def test_a_paste_after_typed_words_is_added_to_them(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send("see: ")
    chat.paste("one\n/two")
    chat.wait_screen("> see: one\n  /two")
    chat.submit(ENTER)
    assert _message(chat) == "see: one\n/two"


def test_pasted_text_cannot_control_the_terminal(chat: Terminal) -> None:
    chat.wait_prompt()
    before = len(chat.raw)
    chat.paste("a\x1b]0;title\x07b\u202ec\x9bd")
    chat.wait_screen("> a·")
    chat.submit(ENTER)
    chat.wait_prompt()
    for control in (b"\x1b]0;title", b"\x07", "\u202e".encode(), "\x9b".encode()):
        assert control not in chat.raw[before:]


def test_an_empty_paste_and_an_edited_one_do_not_count_as_pasted(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.paste("")
    assert "messages" in chat.ask("/stats")
    chat.wait_prompt()
    chat.paste("/")
    chat.send("\x7f")
    assert "messages" in chat.ask("/stats")


def test_quotes_around_nothing_say_nothing_and_text_may_follow_a_block(chat: Terminal) -> None:
    chat.ask("/reset")
    chat.wait_prompt()
    chat.send('""""""' + ENTER)
    chat.settle()
    assert " 0/" in chat.lines[-1]
    assert " written" in chat.ask('"""hi""" he said')


def test_the_toolbar_follows_the_theme(chat: Terminal) -> None:
    chat.ask("/set theme none")
    chat.settle()
    before = len(chat.raw)
    chat.ask("/stats")
    chat.settle()
    assert b"\x1b[0;90m" not in chat.raw[before:]
    chat.ask("/set theme auto")


def test_a_chat_goes_on_if_the_history_can_no_longer_be_written(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.wait_prompt()
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").write_text("in the way", encoding="utf-8")
        assert "messages" in chat.ask("/stats")
        assert "messages" in chat.ask("/stats")
        assert "Exception" not in chat.everything
        assert chat.leave() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Event loop is closed")])
def test_a_line_is_not_lost_to_ctrl_c_as_the_prompt_closes(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_pipe_input() as keys:
        prompt = Prompt(keys, DummyOutput(), history=DummyHistory())
        closes = PromptSession.prompt

        def closed_too_late(self: Any, *args: Any, **options: Any) -> Any:
            closes(self, *args, **options)
            raise error

        keys.send_text("Hello.\r")
        assert prompt.read() == Line("Hello.", is_command=False)
        monkeypatch.setattr(PromptSession, "prompt", closed_too_late)
        keys.send_text("Hello.\r")
        assert prompt.read() == Line("Hello.", is_command=False, is_stopped=True)
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            prompt.read()


def test_a_signal_that_ends_the_chat_while_the_history_is_read_is_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ending(DummyHistory):
        def load_history_strings(self) -> list[str]:
            sys.exit(143)

    with create_pipe_input() as keys, pytest.raises(SystemExit):
        Prompt(keys, DummyOutput(), history=Ending()).read()
    assert not caplog.records


def test_an_interrupt_that_comes_as_the_prompt_has_closed_is_no_exception() -> None:
    with create_pipe_input() as keys:
        prompt = Prompt(keys, DummyOutput(), history=DummyHistory())
        keys.send_text("Hello.\r")
        assert prompt.read() == Line("Hello.", is_command=False)

        async def as_the_event_loop_ends() -> None:
            prompt._prompt.app.key_processor.send_sigint()

        asyncio.run(as_the_event_loop_ends())


def test_a_signal_that_ends_the_program_in_a_task_of_the_prompt_is_no_exception(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def is_ended() -> None:
        sys.exit(143)

    with create_pipe_input() as keys:
        prompt = Prompt(keys, DummyOutput(), history=DummyHistory())
        with pytest.raises(SystemExit, match="143"):
            prompt.read(meanwhile=is_ended)
    assert capsys.readouterr() == ("", "")


class AsksForTheCursor(DummyOutput):
    """A terminal whose answers come as keys, also after a signal."""

    responds_to_cpr = True

    def get_rows_below_cursor_position(self) -> int:
        raise NotImplementedError


def test_a_cursor_position_that_comes_when_a_signal_has_ended_the_prompt_is_no_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = list[object]()
    monkeypatch.setattr(Application, "_handle_exception", lambda *told: problems.append(told))
    with create_pipe_input() as keys:

        def is_ended() -> None:
            keys.send_text("\x1b[1;1R")
            asyncio.get_running_loop().call_soon(sys.exit, 143)

        async def soon() -> None:
            asyncio.get_running_loop().call_later(0.05, is_ended)

        keys.send_text("Hello.\r")  # the prompt waits for the cursor's position
        with pytest.raises(SystemExit, match="143"):
            Prompt(keys, AsksForTheCursor(), history=DummyHistory()).read(meanwhile=soon)
    assert not problems


@pytest.mark.parametrize("name", ["read", "pick", "ask_for_key"])
def test_a_signal_that_ends_the_program_within_a_key_is_no_exception_at_the_next_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, problems = KeyProcessor._call_handler, list[object]()
    with create_pipe_input() as keys:

        def is_ended(*_: object, **given: object) -> None:
            monkeypatch.setattr(KeyProcessor, "_call_handler", usual)
            keys.send_text("\x1b[1;1R")
            sys.exit(143)

        monkeypatch.setattr(KeyProcessor, "_call_handler", is_ended)
        monkeypatch.setattr(
            Application, "_handle_exception", lambda app, loop, context: problems.append(context)
        )
        prompt = Prompt(keys, AsksForTheCursor(), history=DummyHistory())
        waits: dict[str, Callable[[], object]] = {
            "read": prompt.read,
            "pick": lambda: prompt.pick(1, lambda index, width: [[("", "it")]]),
            "ask_for_key": lambda: prompt.ask_for_key("?", "y"),
        }
        keys.send_text("\x1b[B")
        with pytest.raises(SystemExit, match="143"):
            waits[name]()
    assert not problems


def test_a_pasted_sign_names_no_file_even_when_it_comes_back(chat: Terminal, home: Path) -> None:
    file = home / "secret.txt"
    file.write_text("it is 4711", encoding="utf-8")
    chat.wait_prompt()
    chat.paste(f"see @{file} please")
    chat.submit(ENTER)
    chat.wait_prompt()
    assert "was pasted, so it is sent as plain text" in " ".join(chat.text.split())
    assert _message(chat) == f"see @{file} please"
    chat.send(UP + UP)  # over the line of /tokens
    chat.wait_screen(f"> see @{file} please")
    chat.submit(ENTER)
    chat.wait_prompt()
    assert _message(chat, 2) == f"see @{file} please"


def test_a_typed_sign_after_a_paste_names_a_file(chat: Terminal, home: Path) -> None:
    (home / "plain.txt").write_text("it is 4711", encoding="utf-8")
    chat.wait_prompt()
    chat.paste("@anna asks: ")
    chat.send(f"@{home}/plain.txt")
    chat.submit(ENTER)
    chat.wait_prompt()
    assert "it is 4711" in _message(chat)
    assert "@anna asks: " in _message(chat)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_of_keys_ends_in_an_exception(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    raised: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "prompt_toolkit.application.Application._handle_exception",
        lambda self, loop, context: raised.append(context),
    )
    draw = random.Random(seed)
    parts = ["\x1b[", "\x1b]", "\x1bO", "\x1b", "\x1b[M", "\x1b[<", "0;5;5M", "31m", "200~", "201~"]
    parts += [chr(code) for code in range(1, 256) if chr(code) not in "\x03\x04\x18\x1a\r"]
    with create_pipe_input() as keys:
        prompt = Prompt(keys, DummyOutput(), history=DummyHistory())
        for _ in range(20):
            keys.send_text("".join(draw.choices(parts, k=40)) + "\x1b[201~\x0bend\r\rend\r")
            assert prompt.read() is not None
            assert not raised


TEXTS = {
    "a command": "/exit",
    "a docstring": '"""Doc string."""',
    "half a docstring": '"""Doc',
    "a comment": "// a C comment",
    "a line that goes on": "a \\",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_that_was_pasted_stays_text_when_it_comes_back(chat: Terminal, text: str) -> None:
    chat.wait_prompt()
    chat.paste(text)
    chat.submit(ENTER)
    assert _message(chat) == text
    for keys in (UP * 3, CTRL_R + text[-6:-1] + "\r", CTRL_C):
        chat.ask("/reset")
        if keys == CTRL_C:
            chat.paste(text)
            chat.wait_screen("pasted text")
        chat.send(keys)
        chat.settle(0.1)
        if keys == CTRL_C:
            chat.send(UP)
            chat.settle(0.1)
        chat.submit(ENTER)
        assert _message(chat) == text


@pytest.mark.parametrize(
    "keys", ["\x15\x19", UP + "\x1b[B"], ids=["cut and put back", "Up and Down"]
)
def test_text_that_was_pasted_stays_text_within_a_prompt(chat: Terminal, keys: str) -> None:
    chat.ask("/panel off")
    chat.paste("/exit")
    chat.wait_screen("pasted text")
    chat.send(keys)
    chat.submit(ENTER)
    assert _message(chat) == "/exit"


def test_it_stays_text_in_the_next_chat_and_can_be_erased(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.wait_prompt()
        chat.paste("/exit")
        chat.submit(ENTER)
        assert chat.leave() == 0
    with Terminal(home=tmp_path) as chat:
        chat.wait_prompt()
        chat.send(UP)
        chat.wait_screen("> //exit")
        chat.submit(ENTER)
        assert _message(chat) == "/exit"
        chat.ask("/erase turn 0")
        assert "1 typed line erased" in chat.ask("/erase --yes")
        assert "exit" not in (tmp_path / "state" / "history").read_text(encoding="utf-8")


def test_bytes_that_are_no_text_reach_neither_editor_nor_chat(
    chat: Terminal, home: Path, endless: str
) -> None:
    chat.wait_prompt()
    chat.send("a")
    chat.child.send(b"\xff")
    chat.send("b\x18\x05")
    chat.wait_screen("(?m)^> a.b\n  and edited$")
    chat.submit(ENTER)
    assert re.fullmatch("a\ufffd+b\nand edited", _message(chat))
    odd = program(home / "odd.sh", "printf 'a\\377b' > \"$1\"")
    with Terminal("--model", endless, home=home, environ={"EDITOR": odd, "VISUAL": ""}) as first:
        first.send("\x18\x05")
        first.wait_screen("(?m)^> a.b$")
        first.send(CTRL_C)
        assert first.leave() == 0
        assert "Exception" not in first.everything


def test_what_was_no_command_becomes_none_in_the_editor(home: Path, endless: str) -> None:
    editor = program(home / "slash.sh", 'echo /exit > "$1"')
    with Terminal("--model", endless, home=home, environ={"EDITOR": editor, "VISUAL": ""}) as chat:
        chat.wait_prompt()
        chat.send("words\x18\x05")
        chat.wait_screen("(?m)^> /exit$")
        chat.submit(ENTER)
        assert _message(chat) == "/exit"
        chat.send("/stats\x18\x05")
        chat.until(lambda: chat.lines[chat.screen.cursor.y] == "> /exit")
        chat.send(ENTER)
        assert chat.ended() == 0


# --- which signs were pasted


def typed(signs: PastedSigns, text: str, before: str = "") -> None:
    """Type a text key by key."""
    for end in range(1, len(text) + 1):
        signs.changed(before + text[:end])


def test_typed_signs_are_not_pasted_and_pasted_ones_are() -> None:
    signs = PastedSigns()
    typed(signs, "see @a and ")
    signs.changed("see @a and @b, @c", pasted=True)
    assert signs.indices == {11, 15}
    signs.changed("see and @b, @c")
    assert signs.indices == {8, 12}
    signs.changed("see and @b, @c @")
    assert signs.indices == {8, 12}


def test_a_path_pasted_after_a_typed_sign_is_named_by_the_user() -> None:
    signs = PastedSigns()
    typed(signs, "@")
    signs.changed("@/tmp/a.txt", pasted=True)
    assert not signs.indices


def test_a_completion_leaves_the_sign_typed() -> None:
    signs = PastedSigns()
    typed(signs, "@no")
    signs.changed("@notes.txt")
    signs.changed('@"notes.txt"')
    assert not signs.indices


def test_pasted_words_stay_pasted_when_they_come_back_at_once() -> None:
    signs = PastedSigns()
    signs.changed("x @/etc/hosts", pasted=True)
    signs.changed("")
    signs.changed("x @/etc/hosts")  # undo, yank, or the history
    assert signs.indices == {2}
    signs.begin()
    signs.changed("@/etc/hosts is what?")
    assert signs.indices == {0}
    signs.begin()
    signs.changed("@mine is what?")
    assert not signs.indices
    signs.begin()
    typed(signs, "@/etc/hosts")  # by hand, it is meant
    assert not signs.indices


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.booleans())))
def test_no_edit_around_a_pasted_sign_makes_it_typed(edits: list[tuple[int, int, bool]]) -> None:
    signs, text = PastedSigns(), ""
    for number, (at, gone, pasted) in enumerate(edits):
        new = f"@{number} " if pasted else "x"
        text = text[:at] + new + text[at + gone :]
        signs.changed(text, pasted=pasted)
        assert signs.indices == {index for index, char in enumerate(text) if char == "@"}
