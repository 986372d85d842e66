"""Names of saved sessions: they find a session wherever its id does."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from command import run
from saved_chats import SAYINGS, Chat, completions, refusal, resumed, saved
from sirchat.errors import SessionError, UsageError
from sirchat.saved.session_list import LENGTH, find_session, list_sessions
from sirchat.saved.store import SessionStore

pytestmark = pytest.mark.usefixtures("folder")


def test_a_name_finds_a_session_wherever_an_id_does(folder: Path) -> None:
    ident = saved(folder, "My  trip")
    path = find_session(folder, ident)
    assert find_session(folder, "my trip") == path
    assert "My trip" in run("sessions", "list").stdout
    assert SAYINGS[0] in run("sessions", "show", "My trip").stdout
    assert SAYINGS[0] in run("sessions", "export", "MY TRIP").stdout
    chat = Chat()
    chat.do('/load "my trip"')
    assert chat.texts == SAYINGS[:2]
    chat.saved_chat.close()
    assert run("sessions", "rm", "--yes", "My trip").returncode == 0
    assert not path.exists()


def test_names_are_compared_whatever_their_unicode_composition(folder: Path) -> None:
    ident = saved(folder, "Zo\N{COMBINING DIAERESIS}e")
    for typed in ("z\N{LATIN SMALL LETTER O WITH DIAERESIS}e", "zo\N{COMBINING DIAERESIS}e"):
        assert find_session(folder, typed).stem == ident


def test_another_name_replaces_the_first_on_disk_too(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    chat.do("/save Marmalade")
    chat.do("/save oslo")
    chat.saved_chat.close()
    assert find_session(folder, "oslo")
    with pytest.raises(SessionError, match="no saved session"):
        find_session(folder, "Marmalade")
    assert not any(b"Marmalade" in path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        *('""', '" "', "last", "LAST", "20261121-1603-abcd", "20261121", "2026", "-x"),
        *("a" * (LENGTH + 1), "a\tb", "a\x1b[31mb", "a\u202eb"),
    ],
)
def test_an_invalid_name_is_refused_and_nothing_is_saved(folder: Path, name: str) -> None:
    chat = Chat(save=False)
    chat.say(SAYINGS[0])
    error = refusal(chat, f"/save {name}")
    assert "a session can't be called" in error
    assert "allowed" in error
    assert "/save my trip" in error
    assert not folder.exists()
    assert not chat.session.profile.save


def test_a_name_or_id_that_another_session_has_is_refused(folder: Path) -> None:
    find_session(folder, saved(folder)).rename(folder / "copy.sqlite")
    ident = saved(folder, "trip")
    chat = Chat()
    chat.say(SAYINGS[3])
    error = refusal(chat, "/save Trip")
    assert f'{ident} is called "Trip"; allowed' in error
    assert f"sirchat sessions rm {ident}" in error
    assert "no other session has" in refusal(chat, "/save copy")
    chat.do("/save tour")
    chat.do("/save Tour")  # its own, written in another way
    assert find_session(folder, "trip").stem == ident


def test_two_sessions_of_one_name_are_distinguished_by_their_ids(folder: Path) -> None:
    one, other = saved(folder, "trip"), saved(folder, "tour")
    with SessionStore.open(find_session(folder, other)) as store:
        store.rename("trip")
    with pytest.raises(SessionError, match=r'several sessions are called "trip"') as caught:
        find_session(folder, "trip")
    assert one in str(caught.value)
    assert other in str(caught.value)


def test_a_session_from_before_names_opens_and_can_be_named(folder: Path) -> None:
    ident = saved(folder)
    path = find_session(folder, ident)
    with closing(sqlite3.connect(path)) as connection:
        assert not connection.execute("SELECT * FROM about WHERE name = 'name'").fetchall()
    chat = Chat()
    assert "called" not in chat.do(f"/load {ident}")
    chat.do("/save trip")
    chat.saved_chat.close()
    assert find_session(folder, "trip") == path


def test_a_name_in_a_file_cannot_steer_the_terminal(folder: Path) -> None:
    ident = saved(folder)
    with SessionStore.open(find_session(folder, ident)) as store:
        store.rename("trip\x1b]0;gone\x07\x1b[2J")
    assert "\x1b" not in run("sessions", "list").stdout
    chat = Chat()
    assert "trip" in chat.do("/load")
    assert "\x1b" not in chat.do("/load") + chat.do(f"/load {ident}") + chat.do("/save")
    chat.saved_chat.close()
    assert not any("\x1b" in choice for choice in completions("/load "))


def test_a_reset_leaves_the_name_to_the_session_before(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    chat.do("/save trip")
    chat.do("/reset")
    chat.say(SAYINGS[1])
    chat.saved_chat.close()
    assert sorted(entry.name for entry in list_sessions(folder).sessions) == ["", "trip"]
    assert resumed(folder, "trip")[0].turns[0].text == SAYINGS[0]


@pytest.mark.parametrize("target", ["marmalade", "last", "turn 0"])
def test_erased_text_is_in_no_name(folder: Path, target: str) -> None:
    chat = Chat()
    chat.say("Oranges and Marmalade")
    chat.do("/save Marmalade")
    assert "would erase" in chat.do(f"/erase {target}")
    assert "name" in chat.do("/erase --yes")
    chat.saved_chat.close()
    assert [entry.name for entry in list_sessions(folder).sessions] == [""]
    assert not any(b"Marmalade" in path.read_bytes() for path in folder.iterdir())


def test_words_of_the_name_alone_can_be_erased_and_other_words_keep_it(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    chat.do("/save Marmalade")
    chat.do("/erase --yes some words")
    assert find_session(folder, "Marmalade")
    chat.do("/erase --yes MARMALADE")
    assert [entry.name for entry in list_sessions(folder).sessions] == [""]
    with pytest.raises(UsageError):
        chat.do("/erase --yes MARMALADE")
