"""Saved chats are found by what was said in them, as of now; what was removed is found nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from session_files import head_at, new, rows_at, said
from sirchat.errors import UsageError
from sirchat.saved.search import Hit, search_sessions
from sirchat.saved.session_list import branches_of
from sirchat.saved.store import SessionStore


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


def test_what_is_no_whole_chat_is_passed_over_and_a_search_leaves_no_file(tmp_path: Path) -> None:
    path, damaged = new(tmp_path, "Oslo"), new(tmp_path, "Oslo")
    damaged.write_bytes(damaged.read_bytes()[:3000])
    os.mkfifo(tmp_path / "pipe.sqlite")
    (tmp_path / "loop.sqlite").symlink_to(tmp_path / "loop.sqlite")
    before = set(tmp_path.iterdir())
    assert found(tmp_path, "oslo") == [path]
    assert set(tmp_path.iterdir()) == before


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
    assert [chat.path for chat in branches_of(tmp_path, one.stem)] == [one]
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
