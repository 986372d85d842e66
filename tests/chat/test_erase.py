"""What is to be erased is nowhere afterwards: not in memory, and in no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatting import babbler, session
from sirchat.chat.events import Erased
from sirchat.chat.session import Session
from sirchat.errors import UndoError, UsageError
from sirchat.saved.autosave import Autosave, resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from sirchat.ui.typed_input import InMemory, input_history
from terminal import Terminal

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 24}
SECRET = "Marmalade"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    return tmp_path


def files_with(folder: Path, text: str) -> list[str]:
    """The files below a folder that hold `text`, in any case, plain or as UTF-16."""
    found = []
    for path in folder.rglob("*"):
        data = path.read_bytes().lower() if path.is_file() else b""
        if text.lower().encode() in data or text.lower().encode("utf-16-le") in data:
            found.append(path.name)
    return found


def everything_seen(chat: Session) -> str:
    return "".join(row.text for row in chat.tokens(list(range(chat.seen))))


@pytest.mark.parametrize("archive", ["ram", "off"])
def test_it_is_gone_from_memory_and_archive_and_cannot_come_back(archive: str) -> None:
    chat = session(babbler(), archive=archive, policy="sink", **SMALL)
    list(chat.ask(f"The word is {SECRET}."))
    for _ in range(2):
        list(chat.ask(f"other words and {SECRET.lower()} again " * 4))
    resident = chat.resident
    meant = len(chat.why(SECRET))
    held = sum(one.state == "held" for one in chat.why(SECRET))
    (event,) = (e for e in chat.erase(SECRET) if isinstance(e, Erased))
    assert (event.tokens, event.resident) == (meant, resident - held)
    assert SECRET.lower() not in everything_seen(chat).lower()
    assert not any(SECRET.lower() in turn.text.lower() for turn in chat.turns)
    list(chat.switch("/budget", budget=2000))
    assert SECRET.lower() not in "".join(row.text for row in chat.snapshot().rows).lower()
    with pytest.raises(UsageError):
        chat.why(SECRET)
    with pytest.raises(UndoError):
        list(chat.undo())
    list(chat.ask("and on"))


def test_its_keys_and_values_are_overwritten() -> None:
    chat = session(babbler(), policy="sink", **SMALL)
    list(chat.ask(f"The word is {SECRET}."))
    list(chat.ask("other words " * 30))
    archived = [one.row.position for one in chat.why(SECRET) if one.state == "archived"]
    assert archived
    archive = chat._engine.store._archive
    before = archive.fetch(np.array(archived))
    list(chat.erase(SECRET))
    for segment in archive._segments:
        assert segment is not None
        for key, gone in zip(segment.tensors, before.tensors, strict=True):
            for n in range(gone.shape[1]):
                assert not (key == gone[:, n : n + 1]).all(-1).all(0).any()


def test_a_turn_is_erased_whole() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("red green"))
    list(chat.ask("blue black"))
    list(chat.erase("turn 0"))
    assert [turn.text for turn in chat.turns][::2] == ["", "blue black"]
    assert "green" not in everything_seen(chat)
    list(chat.erase("last"))
    assert "black" not in everything_seen(chat)


@pytest.mark.parametrize(
    ("target", "said", "remains"),
    [
        ("is", "This is it, listen", "This  it, listen"),
        ("all", "called all of them", "called  of them"),
        ("Anna's", "It is Anna's. Annas.", "It is . Annas."),
        ("c++", "c++ and c+++", " and +"),
        ("東京", "私は東京に住む", "私はに住む"),
    ],
)
def test_whole_words_are_meant(target: str, said: str, remains: str) -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask(said))
    list(chat.erase(target))
    assert chat.turns[0].text == remains


def test_what_is_nowhere_is_refused_and_nothing_changes() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("red"))
    before = chat.snapshot()
    with pytest.raises(UsageError):
        list(chat.erase("nowhere to be found"))
    assert chat.snapshot() == before
    list(chat.undo())


def test_no_saved_file_has_it_and_the_chat_can_be_taken_up(home: Path) -> None:
    chat = session(babbler(), system=f"Mind the {SECRET}.", **SMALL)
    saving = Autosave(chat)
    for text in (f"The word is {SECRET}.", "other words " * 20, f"{SECRET} again"):
        list(chat.ask(text))
        saving.update()
    assert saving.save_kv()
    assert files_with(home, SECRET)
    list(chat.erase(SECRET))
    saving.update()
    assert files_with(home, SECRET) == []
    list(chat.ask("and on"))
    saving.update()
    saving.close()
    assert files_with(home, SECRET) == []
    store = SessionStore.open(find_session(home / "data" / "sessions", "last"))
    again = Session(babbler(), saved_profile(store))
    resume_session(again, store)
    store.close()
    assert again.snapshot().rows == chat.snapshot().rows


@pytest.mark.parametrize("in_a_file", [True, False])
def test_what_was_typed_is_erased_too(home: Path, in_a_file: bool) -> None:
    history = input_history(print) if in_a_file else InMemory()
    for line in ("one", f"the {SECRET}\nin two lines", "three", f"/erase {SECRET}"):
        history.append_string(line)
    history.erase(lambda line: SECRET in line)
    assert history.get_strings() == ["one", "three"]
    assert files_with(home, SECRET) == []
    history.append_string("four")
    if in_a_file:
        path = home / "state" / "history"
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(input_history(print).load_history_strings()) == ["four", "three", "one"]
        assert [one.name for one in path.parent.iterdir()] == ["history"]


def test_a_system_prompt_is_erased_with_its_turn() -> None:
    chat = session(babbler(), system=f"The word is {SECRET}.", **SMALL)
    list(chat.ask("red"))
    list(chat.erase("turn 0"))
    assert chat.profile.system is None


def test_what_was_said_but_never_read_is_erased_too(home: Path) -> None:
    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    list(chat.ask("red"))
    list(chat.ask("word " * 300 + SECRET, lambda: True))
    saving.update()
    assert SECRET not in everything_seen(chat)
    assert files_with(home, SECRET)
    list(chat.erase(SECRET))
    saving.update()
    assert files_with(home, SECRET) == []
    saving.close()


@pytest.mark.slow
def test_after_an_erasure_in_a_chat_no_file_has_it(home: Path) -> None:
    with Terminal(home=home) as chat:
        chat.say(f"The secret word is {SECRET}.")
        chat.wait_prompt()
        chat.say("Tell me a joke.")
        chat.wait_prompt()
        assert files_with(home, SECRET)
        chat.say(f"/erase {SECRET}")
        chat.wait("would erase")
        chat.wait_prompt()
        chat.say("/erase --yes")
        chat.wait("tokens erased")
        chat.wait_prompt()
        chat.say("Hello!")
        chat.wait_prompt()
        assert files_with(home, SECRET) == []
        chat.say("/exit")
        assert chat.ended() == 0
    assert files_with(home, SECRET) == []


def test_a_replaced_system_prompt_is_erased_and_the_one_in_force_stays() -> None:
    chat = session(system="You are Tiny.")
    list(chat.ask("Hello."))
    list(chat.switch("/system", system="You are kind."))
    list(chat.erase("turn 0"))
    assert chat.profile.system == "You are kind."
    assert [turn.text for turn in chat.turns if turn.role == "system"] == ["", "You are kind."]
