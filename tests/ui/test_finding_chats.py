"""Lists of saved chats, and a chat that is found by its words and picked with the arrow keys."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from command import run
from fake_terminal import FakeTerminal
from saved_chats import Chat, refusal, saved
from session_files import new
from sirchat.paths import sessions_dir
from sirchat.saved.search import SnippetPart
from sirchat.saved.session_list import list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.lists import SessionLines, draw_sessions
from sirchat.ui.screen import Screen
from terminal import Terminal

pytestmark = pytest.mark.usefixtures("folder")

UP, DOWN, ESC = "\x1b[A", "\x1b[B", "\x1b"


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
    chats = SessionLines(list_sessions(folder).sessions, "another")
    shown = [["".join(text for _, text in line) for line in chats.lines(n, width)] for n in (0, 1)]
    assert all(cell_len(line) <= width for lines in shown for line in lines)
    for session, lines in zip(chats.sessions, shown, strict=True):
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
    assert "has all of these words (fewer words find more" in done.stderr
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
    chats = SessionLines(list_sessions(sessions_dir()).sessions, matches={path.stem: parts})
    _, line = chats.lines(0, 80)
    assert line == [("", "    "), ("", "to "), ("match", "Rome"), ("", " by train")]
    Screen(terminal, terminal).show(draw_sessions(chats, terminal.size().columns))
    assert "\x1b[1;4mRome" in terminal.getvalue()


def test_load_takes_an_id_or_a_name_before_words(folder: Path) -> None:
    ident = saved(folder, "words")
    saved(folder, "other")  # `words` was said in both
    chat = Chat()
    assert f"this chat is session {ident}" in chat.do("/load Words")
    assert f"session {ident} is this chat" in chat.do(f"/load {ident[:-1]}")


def test_load_with_words_lists_the_chats_where_nothing_can_be_picked(folder: Path) -> None:
    ident = saved(folder)
    chat = Chat()
    shown = chat.do("/load more of th")
    assert ident in shown
    assert "more of them" in shown
    assert "/load ID opens one of them" in shown
    assert not chat.texts
    assert "fewer words find more" in refusal(chat, "/load nobody said this")
    assert "has no word to search for" in refusal(chat, "/load ?!")
    saved(folder, "my trip")
    assert "did you mean my trip?" in refusal(chat, "/load my tirp")


# --- picking


@pytest.mark.slow
def test_a_chat_is_picked_with_the_arrow_keys(tmp_path: Path, folder: Path) -> None:
    for number in range(27):
        new(folder, f"This is what chat {number} is about")
    with Terminal(home=tmp_path, columns=60, rows=12) as chat:
        for name, town in (("anna", "Rome"), ("peter", "Oslo"), ("eva", "Rome")):
            chat.ask(f"{name.title()} lives in {town}.")
            chat.ask(f"/save {name}")
            chat.ask("/reset")
        for keys in (ESC, "\x03"):
            chat.say("/load lives rome")
            chat.wait_screen(r"1 of 2: arrows, Enter opens, Esc leaves")
            assert re.search(r"(?m)^> 20(.|\n)*eva: Eva lives in Rome\.", chat.text)
            assert "anna: Anna lives in Rome." in chat.text
            assert "peter" not in chat.text.partition("> /load")[2]
            chat.send(keys)
            chat.wait_prompt()
            assert "nothing is loaded; this chat goes on" in chat.shown
            assert "of 2" not in chat.text, "the list is removed"
        chat.say("/load lives rome")
        chat.wait_screen(r"1 of 2")
        chat.send(DOWN)
        chat.wait_screen(r"2 of 2")
        chat.send("\r")
        chat.wait_prompt()
        assert 'called "anna"' in " ".join(chat.shown.split())
        chat.say("/load")
        chat.wait_screen("1 of 30")
        for keys, at in (
            (DOWN * 6, "7 of 30"),
            (UP * 9, "1 of 30"),
            (DOWN * 5 + UP * 5, "1 of 30"),
        ):
            chat.send(keys)
            chat.wait_screen(rf"(?m)^{at}")
            assert len(re.findall(r"(?m)^(> |  )20", chat.text)) >= 5
            assert len(re.findall(r"(?m)^> 20.*\n  .*(lives|chat)", chat.text)) == 1
        chat.resize(12, 130)
        chat.send(DOWN)
        chat.wait_screen(r"2 of 30")
        chat.send("\x04")
        assert chat.leave() == 0
