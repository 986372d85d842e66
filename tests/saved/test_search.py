"""Saved chats are found by what was said in them, as of now; what was removed is found nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from session_files import Elsewhere, head_at, new, rows_at, said
from sirchat.errors import SessionError, UsageError
from sirchat.saved.search import Hit, search_sessions
from sirchat.saved.session_list import branches_of, check_name, find_session, remove_session
from sirchat.saved.store import Extent, SessionStore

SECRET = "Xylophone"


def found(folder: Path, words: str) -> list[Path]:
    return [hit.session.path for hit in search_sessions(folder, words).hits]


def line(hit: Hit) -> str:
    """The line of a hit, with the matches in brackets."""
    return "".join(f"[{part.text}]" if part.is_match else part.text for part in hit.snippet)


def test_a_chat_is_found_by_words_that_either_side_said_and_the_line_is_shown(
    tmp_path: Path,
) -> None:
    new(tmp_path, "Tell me about Oslo.", "It is cold.")
    path = new(tmp_path, "Where was I?", "In Berlin.\nYou went to Rome by train,\nand home.")
    for words in ("train rome", "ROME", "rome tra"):
        (hit,) = search_sessions(tmp_path, words).hits
        assert hit.session.path == path
    assert line(hit) == "…In Berlin. You went to [Rome] by [train], and home."
    assert found(tmp_path, "berlin home") == [path], "words of different lines"
    assert not found(tmp_path, "berlin oslo"), "words of different chats"
    assert not found(tmp_path, "rom train"), "only the last word may be cut short"


def test_the_best_chat_is_first_and_of_equals_the_newest(tmp_path: Path) -> None:
    texts = ["rome", "oslo", "rome", "paris", "rome rome", "rome", "bonn", "rome", *["bern"] * 5]
    paths = [new(tmp_path, text) for text in texts]
    for age, path in enumerate(paths):
        os.utime(path, (1.6e9 + age, 1.6e9 + age))
    assert found(tmp_path, "rome") == [paths[at] for at in (4, 7, 5, 2, 0)]


def test_a_pipe_or_a_link_in_the_place_of_a_chat_keeps_no_search_waiting(tmp_path: Path) -> None:
    path = new(tmp_path, "Tell me about Oslo.")
    os.mkfifo(tmp_path / "pipe.sqlite")
    (tmp_path / "loop.sqlite").symlink_to(tmp_path / "loop.sqlite")
    assert found(tmp_path, "oslo") == [path]


@pytest.mark.parametrize(
    ("text", "words", "marked"),
    [
        ("Grüße aus Málaga", "grusse MALAGA", "Grüße aus [Málaga]"),
        ("un cafe\N{COMBINING ACUTE ACCENT} noir", "café", "un [café] noir"),
        ("昨日、東京に行きました。", "東京", "昨日、[東京]に行きました。"),
        ("ฉันอยากไปกรุงเทพ", "กรุงเทพ", "ฉันอยากไป[กรุงเทพ]"),
        ("오늘 서울에서 만나요", "서울", "오늘 [서울]에서 만나요"),
        ("मुझे हिन्दी पसंद है", "हिन्दी", "मुझे [हिन्दी] पसंद है"),
        ("Привет, Москва!", "москва", "Привет, [Москва]!"),
        ("I don't know", "don't", "I [don't] know"),
        ("I write C++ all day", "C++", "I write [C]++ all day"),  # not what begins with c
    ],
)
def test_text_of_any_language_is_found(tmp_path: Path, text: str, words: str, marked: str) -> None:
    new(tmp_path, "something else, I can call a cab")
    path = new(tmp_path, text)
    hits = search_sessions(tmp_path, words.split()[-1]).hits
    assert [hit.session.path for hit in hits] == [path]
    assert line(hits[0]) == marked


def test_words_are_never_taken_for_a_query_language(tmp_path: Path) -> None:
    path = new(tmp_path, 'NOT a "quoted" name:value* (x) AND ^this OR that NEAR here')
    odd = ('"quoted', "name:value*", "(x", "NOT", "AND ^this", "NEAR(here", "text:a", "a\0b")
    for words in odd:
        assert found(tmp_path, words) in ([path], []), words
    assert found(tmp_path, 'not "quoted" NEAR') == [path]
    for words in ("", "  ", "?!", '"*"', "\0"):
        with pytest.raises(UsageError, match="allowed: letters and digits"):
            search_sessions(tmp_path, words)
    assert not found(tmp_path, "caf\udce9")  # bytes that are not UTF-8, from the command line


def test_a_search_knows_the_chats_as_they_are_now(tmp_path: Path) -> None:
    one, other = new(tmp_path, "rome"), new(tmp_path, "oslo")
    assert found(tmp_path, "rome") == [one]
    with SessionStore.open(one) as session:
        session.append(said("lisbon", start=1), rows_at(range(3, 6)), head_at(6))
        assert found(tmp_path, "lisbon") == [one], "also while the chat is open"
        session.rename("My trip")
        (hit,) = search_sessions(tmp_path, "trip").hits
        assert (hit.session.path, hit.snippet) == (one, ()), "found by its name"
    third = new(tmp_path, "lisbon")
    assert set(found(tmp_path, "lisbon")) == {one, third}
    one.unlink()
    assert found(tmp_path, "lisbon") == [third]
    assert found(tmp_path, "oslo") == [other]
    assert not search_sessions(tmp_path / "missing", "x").hits


def test_names_and_branches_are_found_and_a_name_belongs_to_one_chat(tmp_path: Path) -> None:
    path, _ = new(tmp_path, "rome"), new(tmp_path, "oslo")
    with SessionStore.open(path) as session:
        session.rename("My trip")
    assert find_session(tmp_path, "MY TRIP") == path
    with pytest.raises(SessionError, match="allowed: a name that no other session has"):
        check_name(tmp_path, "my trip", own_id="")
    assert [chat.path for chat in branches_of(tmp_path, path.stem)] == [path]


def test_a_damaged_chat_is_passed_over_and_a_search_leaves_no_file(tmp_path: Path) -> None:
    path, damaged = new(tmp_path, "rome"), new(tmp_path, "rome")
    damaged.write_bytes(damaged.read_bytes()[:3000])
    assert found(tmp_path, "rome") == [path]
    assert set(tmp_path.iterdir()) == {path, damaged}


def erase(path: Path) -> None:
    with SessionStore.open(path) as session:
        session.append(
            said("Hello", "Oranges"), rows_at(range(6)), head_at(6), extent=Extent(0, 0, 0, 0)
        )


def undo(path: Path) -> None:
    with SessionStore.open(path) as session:
        session.append([], rows_at(range(0)), head_at(3), extent=Extent(1, 3))


@pytest.mark.parametrize("removal", [erase, undo, remove_session])
def test_text_that_is_removed_from_a_chat_stays_in_no_file(
    tmp_path: Path, removal: Callable[[Path], None]
) -> None:
    path, _ = new(tmp_path, "Hello", f"{SECRET} is made of oranges. " * 30), new(tmp_path, "oslo")
    assert found(tmp_path, SECRET) == [path]
    removal(path)
    assert not any(SECRET.encode() in file.read_bytes() for file in tmp_path.iterdir())
    assert not found(tmp_path, SECRET)


@pytest.mark.slow
def test_several_processes_search_and_write_at_the_same_time(tmp_path: Path) -> None:
    code = """
from sirchat.saved.search import search_sessions
for n in range(3):
    with SessionStore.create(path, {}) as s:
        s.append(said("rome", "soon undone"), rows_at(range(6)), head_at(6))
    search_sessions(path, "rome")
    with SessionStore.open(s.path) as s:
        s.append([], rows_at(range(0)), head_at(3), extent=Extent(1, 3))
print(len(search_sessions(path, "undone").hits) < 3)
"""
    others = [Elsewhere(code, tmp_path) for _ in range(2)]
    assert [process.stdout.read() for process in others] == ["True\n"] * 2
    assert len(found(tmp_path, "rome")) == 6
    assert not found(tmp_path, "undone")
