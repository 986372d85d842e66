"""Lists of saved chats, and chats that are found by their words."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from command import run
from fake_terminal import FakeTerminal
from saved_chats import SAYINGS, Chat, refusal, saved
from session_files import new
from sirchat.paths import sessions_dir
from sirchat.saved.search import SnippetPart
from sirchat.saved.session_list import list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.lists import draw_sessions
from sirchat.ui.screen import Screen

pytestmark = pytest.mark.usefixtures("folder")


def named(folder: Path, name: str, *texts: str, model: str = "tiny") -> Path:
    path = new(folder, *texts, model=model)
    with SessionStore.open(path) as store:
        store.rename(name)
    return path


# --- lists


@pytest.mark.parametrize("width", [60, 81, 199])
def test_a_list_shows_everything_about_a_chat_at_every_width(folder: Path, width: int) -> None:
    named(folder, "my trip", "My name is Anna.", "Hello", "Where does Peter live?", "東京" * 60)
    new(folder, "Only this is said", "x", model="A-model-of-a-very-long-name")
    sessions = list_sessions(folder).sessions
    console = Console(file=io.StringIO(), width=300)
    console.print(draw_sessions(sessions, width), soft_wrap=True)
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(cell_len(line) <= width for line in shown)
    for session, lines in zip(sessions, zip(shown[::2], shown[1::2], strict=True), strict=True):
        text = "\n".join(lines)
        facts = (
            session.id,
            f"{session.updated:%Y-%m-%d %H:%M}",
            f"{session.turns} messages",
            session.model[:9],
        )
        assert all(fact in text for fact in facts)
        assert {2: "Only this", 4: "my trip: My name is Anna."}[session.turns] in text


def test_where_there_is_no_terminal_each_chat_is_one_whole_line(folder: Path) -> None:
    name = "a name that is as long as names may be.."
    named(folder, name, "word " * 15)
    (line,) = run("sessions", COLUMNS="60").stdout.splitlines()
    assert name in line
    assert line.endswith("word word")
    new(folder, "Hello", "Hi!", "My name is Anna.", "I see.")  # the first line tells little
    assert "My name is Anna." in run("sessions").stdout


def test_sessions_search_prints_the_best_twenty_with_their_lines(folder: Path) -> None:
    first = new(folder, "Oslo is cold.")
    path = named(folder, "trip", "Hello", "We go to Rome\nby a night train.")
    done = run("sessions", "search", "night", "train")
    assert done.returncode == 0
    line = rf"{path.stem}  .* 2 messages  tiny  trip: …We go to Rome by a night train\.\n"
    assert re.fullmatch(line, done.stdout)
    done = run("sessions", "search", "lima", "\x1b[2J")
    assert (done.returncode, done.stdout) == (1, "")
    assert "(fewer words find more" in done.stderr
    assert "\x1b" not in done.stderr
    assert run("sessions", "search", "?!").returncode == 2
    for number in range(24):
        os.link(first, folder / f"copy{number}.sqlite")
    done = run("sessions", "search", "oslo")
    assert len(done.stdout.splitlines()) == 20
    assert "and 5 more with a weaker match; add words to find fewer" in done.stderr


def test_matches_are_marked_in_the_line_that_was_found(terminal: FakeTerminal) -> None:
    parts = (SnippetPart("to ", False), SnippetPart("Rome", True), SnippetPart(" by train", False))
    path = new(sessions_dir(), "We go to Rome.")
    chats, width = list_sessions(sessions_dir()).sessions, terminal.size().columns
    Screen(terminal, terminal).show(draw_sessions(chats, width, {path.stem: parts}))
    assert "    to \x1b[1;4mRome\x1b[0m by train" in terminal.getvalue()


def test_load_takes_an_id_or_a_name(folder: Path) -> None:
    ident = saved(folder, "words")
    chat = Chat()
    assert f"this chat is session {ident}" in chat.do("/load Words")
    assert f"session {ident} is this chat" in chat.do(f"/load {ident[:-1]}")


def test_search_finds_messages_of_this_chat_held_or_evicted_and_saved_chats(folder: Path) -> None:
    long = "9 some words and 81 more of them, and a heron"
    other = saved(folder, "trip")
    chat = Chat(budget=64)
    chat.say("The Pelican of Oslo is grey.", *SAYINGS[2:4], "A pelican flies", long)
    assert chat.session.resident < chat.session.seen
    shown = chat.do("/search pelican")
    assert "  you: …81 more of them, and a heron\n" in chat.do("/search heron")
    assert shown.startswith("in this chat:\n  you: The Pelican of Oslo is grey.\n")
    assert "  you: A pelican flies\n" in shown
    assert "saved chats" not in shown
    shown = chat.do("/search pelican oslo")
    assert shown.count("you:") == 1
    shown = chat.do("/search some words")
    assert re.search(rf"in saved chats, which /load ID opens:\n{other} (.|\n)*trip", shown)
    assert chat.saved_chat._autosave.id not in shown.partition("saved chats")[2]
    assert "no message and no saved chat has all of" in refusal(chat, "/search Ostrich")
    assert "has no word to search for" in refusal(chat, "/search ...")
    first = chat.saved_chat._autosave.id
    for number in range(21):
        os.link(folder / f"{other}.sqlite", folder / f"copy{number}.sqlite")
    shown = chat.do("/search some words")
    assert len(re.findall("(?m)^copy|^2", shown)) == 20
    assert "and 2 more with a weaker match; add words to find fewer" in shown
    assert first not in shown.partition("saved chats")[2]
