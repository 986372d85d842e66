"""Stopped turns, failed turns, and typing during a reply: the conversation stays well-formed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatting import babbler
from fake_terminal import FakeTerminal
from terminal import Shared, Terminal, pager_into
from typed_chat import TypedChat

ESCAPE, ENTER, UP, CTRL_C = "\x1b", "\r", "\x1b[A", "\x03"


@pytest.fixture(scope="module")
def paged(home: Path) -> Path:
    """The file with the pager's last input."""
    return home / "paged"


@pytest.fixture(scope="module")
def shared(home: Path, paged: Path, endless: str) -> Iterator[Shared]:
    environ = {"PAGER": pager_into(paged)}
    with Shared(lambda: Terminal("--model", endless, home=home, environ=environ)) as chats:
        yield chats


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


@pytest.mark.slow
@pytest.mark.parametrize("key", [CTRL_C, ESCAPE], ids=["Ctrl-C", "Esc"])
def test_a_key_stops_a_reply_and_keeps_it(speaker: Terminal, paged: Path, key: str) -> None:
    speaker.begin_reply()
    speaker.send(key)
    speaker.wait("interrupted")
    speaker.wait_prompt()
    # The newest ones: on a busy machine a reply grows until its beginning is evicted.
    words = re.findall(r"[a-z]{4,}", speaker.shown.partition("interrupted")[0])[-20:]
    held = _held(speaker, paged)
    assert sum(word in held for word in words) > 5
    speaker.begin_reply("And then?")
    speaker.send(key)
    speaker.wait("interrupted")


def test_arrow_keys_do_not_stop_a_reply(speaker: Terminal) -> None:
    speaker.ask("/set max_new_tokens 1500")
    speaker.begin_reply()
    for key in ("A", "B", "C", "D", "H", "F", "3~"):
        speaker.send(f"\x1b[{key}")
    speaker.wait_prompt()
    assert " 1,500 written" in speaker.shown
    assert "cut at the length limit" in " ".join(speaker.shown.split())


def test_ctrl_c_at_an_empty_prompt_says_how_to_leave(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.submit(CTRL_C)
    chat.wait_prompt()
    assert chat.text.count("Ctrl-D or /exit leaves") == 1


@pytest.mark.slow
def test_what_is_typed_ahead_is_in_the_next_prompt_and_not_in_the_reply(speaker: Terminal) -> None:
    speaker.begin_reply()
    speaker.send("/budget 64\r")
    speaker.paste("/reset\nzzqq")
    speaker.read_on()
    assert b"zzqq" not in speaker.raw[-6000:]
    speaker.send(ESCAPE)
    speaker.wait("budget: 1024 -> 64")
    speaker.wait_screen("> /reset\n  zzqq")
    speaker.wait_screen("pasted text: sent as it is, never run as a command")
    assert speaker.everything.count("zzqq") == 1
    speaker.send(CTRL_C)


def test_an_error_in_a_turn_is_one_line_and_keeps_the_conversation(
    terminal: FakeTerminal, own_home: Path
) -> None:
    with TypedChat(terminal, babbler(), max_new_tokens=3) as chat:
        chat.ask("Hello.")
        chat.ask("/policy full")
        seen = chat.session.seen
        shown = chat.press("海" * 1600, "\r")
        assert shown.split("海")[-1].strip().startswith("sirchat: ")
        assert chat.session.seen == seen
        assert "3 written" in chat.ask("Hello again.")


def test_ctrl_c_while_a_long_message_is_read_stops_the_reading(chat: Terminal) -> None:
    chat.wait_prompt()
    text = " ".join(f"word{i}" for i in range(8000))
    chat.paste(text)
    chat.wait_screen("word7999")
    chat.submit(ENTER)
    chat.wait_screen(r"reading [█▏▎▍▌▋▊▉]* +[\d,]+ of [\d,]{6} tokens")
    chat.send(CTRL_C)
    chat.wait_prompt()
    read = re.search(r"([\d,]+) tokens read, 0 written, .*interrupted", chat.text, re.DOTALL)
    assert read
    assert int(read[1].replace(",", "")) < 30_000  # of 38,895
    assert "reading" not in chat.text
    assert "3 written" in chat.ask("Hello.")
