"""Names of saved sessions: they find a session wherever its id does."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import run
from saved_chats import SAYINGS, Chat, completions, refusal, resumed, saved
from sirchat.errors import SessionError, UsageError
from sirchat.saved.session_list import MAX_NAME_CHARS, find_session, list_sessions
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
    other = saved(folder, "tour")
    with SessionStore.open(find_session(folder, other)) as store:
        store.rename("zöe")
    with pytest.raises(SessionError, match=r'several sessions are called "zöe"') as caught:
        find_session(folder, "zöe")
    assert ident in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize(
    ("said", "gone"),
    [
        ("Oranges", "/save oslo"),
        ("Oranges", "/erase --yes MARMALADE"),  # of the name alone
        *(("Oranges and Marmalade", f"/erase {what}") for what in ("marmalade", "last", "turn 2")),
    ],
)
def test_a_name_that_is_replaced_or_erased_is_in_no_file(
    folder: Path, said: str, gone: str
) -> None:
    chat = Chat()
    chat.say("some words", said)
    chat.do("/save Marmalade")
    chat.do("/erase --yes some words")
    assert find_session(folder, "Marmalade")  # other words keep it
    chat.do(gone)
    if gone.startswith("/erase"):
        assert "--yes" in gone or "name" in chat.do("/erase --yes")
        with pytest.raises(UsageError):
            chat.do("/erase --yes MARMALADE")
    chat.saved_chat.close()
    name = "oslo" if gone == "/save oslo" else ""
    assert [entry.name for entry in list_sessions(folder).sessions] == [name]
    with pytest.raises(SessionError, match="no saved session"):
        find_session(folder, "Marmalade")
    assert not any(b"Marmalade" in path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        *('""', '" "', "last", "LAST", "20261121-1603-abcd", "20261121", "2026", "-x"),
        *("a" * (MAX_NAME_CHARS + 1), "a\tb", "a\x1b[31mb", "a\u202eb"),
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
