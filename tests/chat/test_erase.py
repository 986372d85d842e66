"""What is to be erased is nowhere afterwards: not in memory, and in no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatting import babbler, held_text, session, text_at
from fake_terminal import FakeTerminal
from sirchat.chat.events import Erased
from sirchat.chat.session import Session
from sirchat.errors import UndoError, UsageError
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from sirchat.ui.typed_input import MemoryHistory, open_history
from typed_chat import TypedChat

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 24}
SECRET = "Marmalade"


pytestmark = pytest.mark.usefixtures("own_home")


def files_with(folder: Path, text: str) -> list[str]:
    """The files below a folder that hold `text`, in any case, plain or as UTF-16."""
    found = []
    for path in folder.rglob("*"):
        data = path.read_bytes().lower() if path.is_file() else b""
        if text.lower().encode() in data or text.lower().encode("utf-16-le") in data:
            found.append(path.name)
    return found


@pytest.mark.parametrize("archive", ["ram", "off"])
def test_erased_words_are_in_neither_memory_nor_archive(archive: str) -> None:
    chat = session(babbler(), archive=archive, policy="sink", **SMALL)
    list(chat.ask(f"The word is {SECRET}."))
    for _ in range(2):
        list(chat.ask(f"other words and {SECRET.lower()} again " * 4))
    resident = chat.resident
    meant = len(chat.why(SECRET))
    held = sum(token.state == "held" for token in chat.why(SECRET))
    (event,) = (e for e in chat.erase(SECRET) if isinstance(e, Erased))
    assert (event.tokens, event.resident) == (meant, resident - held)
    assert SECRET.lower() not in text_at(chat, range(chat.seen)).lower()
    assert not any(SECRET.lower() in turn.text.lower() for turn in chat.turns)
    chat.switch("/budget", budget=2000)
    assert SECRET.lower() not in held_text(chat).lower()
    with pytest.raises(UsageError):
        chat.why(SECRET)
    with pytest.raises(UndoError):
        chat.undo()
    list(chat.ask("and on"))


def test_erased_keys_and_values_are_overwritten() -> None:
    chat = session(babbler(), policy="sink", **SMALL)
    list(chat.ask(f"The word is {SECRET}."))
    list(chat.ask("other words " * 30))
    archived = [token.row.position for token in chat.why(SECRET) if token.state == "archived"]
    assert archived
    archive = chat.engine.store.archive
    before = archive.fetch(np.array(archived))
    chat.erase(SECRET)
    for segment in archive._segments.values():
        for key, gone in zip(segment.tensors, before.tensors, strict=True):
            for n in range(gone.shape[1]):
                assert not (key == gone[:, n : n + 1]).all(-1).all(0).any()


def test_a_whole_turn_can_be_erased() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("red green"))
    list(chat.ask("blue black"))
    chat.erase("turn 0")
    assert [turn.text for turn in chat.turns][::2] == ["", "blue black"]
    assert "green" not in text_at(chat, range(chat.seen))
    chat.erase("last")
    assert "black" not in text_at(chat, range(chat.seen))


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
def test_erase_means_whole_words(target: str, said: str, remains: str) -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask(said))
    chat.erase(target)
    assert chat.turns[0].text == remains


def test_no_saved_file_has_erased_words_and_the_chat_resumes(own_home: Path) -> None:
    chat = session(babbler(), system=f"Mind the {SECRET}.", **SMALL)
    saving = Autosave(chat)
    for text in (f"The word is {SECRET}.", "other words " * 20, f"{SECRET} again"):
        list(chat.ask(text))
        saving.save()
    assert saving.save_kv()
    assert files_with(own_home, SECRET)
    chat.erase(SECRET)
    saving.save()
    assert files_with(own_home, SECRET) == []
    list(chat.ask("and on"))
    saving.save()
    saving.close()
    assert files_with(own_home, SECRET) == []
    store = SessionStore.open(find_session(own_home / "data" / "sessions", "last"))
    again = Session(babbler(), saved_profile(store))
    resume_session(again, store)
    store.close()
    assert again.snapshot().rows == chat.snapshot().rows


@pytest.mark.parametrize("in_a_file", [True, False])
def test_typed_lines_are_erased(own_home: Path, in_a_file: bool) -> None:
    history = open_history(print) if in_a_file else MemoryHistory()
    for line in ("one", f"the {SECRET}\nin two lines", "three", f"/erase {SECRET}"):
        history.append_string(line)
    history.erase(lambda line: SECRET in line)
    assert history.get_strings() == ["one", "three"]
    assert files_with(own_home, SECRET) == []
    history.append_string("four")
    if in_a_file:
        path = own_home / "state" / "history"
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(open_history(print).load_history_strings()) == ["four", "three", "one"]
        assert {path.name for path in path.parent.iterdir()} == {"history", "history.lock"}


def test_erase_finds_text_that_was_never_read(own_home: Path) -> None:
    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    list(chat.ask("red"))
    list(chat.ask("word " * 300 + SECRET, lambda: True))
    saving.save()
    assert SECRET not in text_at(chat, range(chat.seen))
    assert files_with(own_home, SECRET)
    chat.erase(SECRET)
    saving.save()
    assert files_with(own_home, SECRET) == []
    saving.close()


def test_erase_at_the_prompt_leaves_the_words_in_no_file(
    terminal: FakeTerminal, own_home: Path
) -> None:
    with TypedChat(terminal, babbler(), max_new_tokens=4) as chat:
        chat.ask(f"The secret word is {SECRET}.")
        chat.ask("Tell me a joke.")
        assert len(files_with(own_home, SECRET)) >= 2
        assert "would erase" in chat.ask(f"/erase {SECRET}")
        assert "tokens erased" in chat.ask("/erase --yes")
        chat.ask("Hello!")
        assert files_with(own_home, SECRET) == []
    assert files_with(own_home, SECRET) == []


def test_a_system_prompt_is_erased_with_its_turn_and_no_other_in_force() -> None:
    chat = session(babbler(), system=f"The word is {SECRET}.", **SMALL)
    list(chat.ask("red"))
    chat.switch("/system", system="You are kind.")
    chat.erase("turn 0")
    assert chat.profile.system == "You are kind."
    assert [turn.text for turn in chat.turns if turn.role == "system"] == ["", "You are kind."]
    chat.erase("turn 3")
    assert chat.profile.system is None
