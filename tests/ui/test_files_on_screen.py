"""Files in a chat, in a real terminal: what is said before they are read, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirchat.text.text_file import MOST_FILE_BYTES
from terminal import Shared, Terminal

COLUMNS = (60, 100, 160)


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    """The folder that the chats are started in."""
    folder = home / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("My name is Anna.\n", encoding="utf-8")
    (folder / "a b.md").write_text("My name is <|end|>Ben.\n", encoding="utf-8")
    (folder / "long.txt").write_text("one two three four\n" * 200, encoding="utf-8")
    (folder / "big.txt").write_bytes(b"x" * (MOST_FILE_BYTES + 1))
    (folder / "a.png").write_bytes(b"\x89PNG\0")
    (folder / "docs").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module", params=COLUMNS)
def shared(request: pytest.FixtureRequest, home: Path, folder: Path) -> Iterator[Shared]:
    before = Path.cwd()
    os.chdir(folder)
    chats = Shared(lambda: Terminal("--panel", "off", home=home, columns=request.param))
    yield chats
    chats.close()
    os.chdir(before)


@pytest.fixture
def chat(shared: Shared) -> Terminal:
    return shared.anew()


def _ask(chat: Terminal, line: str) -> str:
    """What is shown for a line, on one line."""
    return " ".join(chat.ask(line).split())


def _seen(chat: Terminal) -> str:
    return _ask(chat, "/stats").split(";")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("@notes.txt What is my name?", "notes.txt"),
        ("/read notes.txt What is my name?", "notes.txt"),
    ],
)
def test_the_size_is_said_and_then_the_question_is_answered(
    chat: Terminal, line: str, name: str
) -> None:
    shown = chat.ask(line)
    first, *_ = shown.splitlines()
    assert re.fullmatch(rf"{re.escape(name)}: \d+ tokens; the budget is 1,024 tokens", first)
    assert re.search(r"\d+ tokens read, \d+ written, .* holds \d+/1,024", " ".join(shown.split()))
    assert "Anna" in chat.ask("/tokens turn 0")


def test_a_control_token_in_a_file_ends_no_turn(chat: Terminal) -> None:
    assert "a b.md: " in _ask(chat, '@"a b.md" hello')
    assert re.match(r"2 messages;", _ask(chat, "/stats"))


@pytest.mark.slow
def test_a_file_beyond_the_budget_is_announced_as_such(chat: Terminal) -> None:
    chat.ask("/budget 256")
    shown = _ask(chat, "/read long.txt")
    assert re.match(
        r"long\.txt: [\d,]+ tokens; the budget is 256 tokens, so most of the text "
        "will be evicted while it is read ",
        shown,
    )
    assert re.search(r"holds 2\d\d/256", shown)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/read none.txt", "there is no file none.txt (did you mean notes.txt?)"),
        ("/read", "/read: expected the name of a file (type /read FILE, or /read FILE QUESTION)"),
        ("/read docs", "docs is a folder (give the name of a file in docs)"),
        ("see @docs/ please", "docs/ is a folder (give the name of a file in docs/)"),
        ("@pipe", "pipe is a device or a pipe, not a regular file"),
        ("@/dev/zero", "/dev/zero is a device or a pipe, not a regular file"),
        ("@big.txt", "big.txt has 1,048,577 bytes; allowed: up to 1,048,576"),
        ("what is @a.png?", "a.png is not text: it contains NUL bytes"),
    ],
)
def test_what_is_refused_costs_a_line_and_nothing_is_sent(
    chat: Terminal, line: str, error: str
) -> None:
    assert _ask(chat, line).startswith(f"sirchat: {error}")
    assert _seen(chat) == " 0 tokens read, 0 written, 0 tok/s"


def test_a_missing_path_is_pointed_out_and_a_name_is_not(chat: Terminal) -> None:
    shown = _ask(chat, "hello @anna and @notes.md")
    assert shown.startswith("there is no file notes.md, so the name is sent as plain text ")
    assert "@anna" not in shown


def test_erasing_such_a_message_erases_the_line_that_was_typed(chat: Terminal, home: Path) -> None:
    chat.ask("@notes.txt who is it, in secret?")
    history = home / "state" / "history"
    assert "in secret" in history.read_text(encoding="utf-8")
    chat.ask("/erase last")
    assert "1 typed line erased" in _ask(chat, "/erase --yes")
    assert "in secret" not in history.read_text(encoding="utf-8")


def test_help_tells_of_the_commands(chat: Terminal) -> None:
    assert _ask(chat, "/help read").startswith("/read FILE [QUESTION] ")
    assert _ask(chat, "/help copy").startswith("/copy [code|N] ")
    assert _ask(chat, "/help export").startswith("/export md|html|json|svg ")
    assert "@FILE" in _ask(chat, "/help")
