"""The passages of a chat, with their vectors, are saved and removed with its text."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from chatting import babbler, session
from random_encoders import random_encoder
from session_files import head_at, new, refusal, rows_at, said, sum_again
from sirchat.chat.session import Session
from sirchat.errors import DamagedSessionError
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.store import PASSAGE, Extent, SavedPassages, SessionStore


def passages(*spans: tuple[int, int]) -> SavedPassages:
    """Passages of the user's turn 0, with a vector each; the first one's is not known."""
    rows = np.array([(start, end, 0, 2) for start, end in spans], PASSAGE)
    vectors = np.arange(4 * len(spans), dtype=np.float16).reshape(-1, 4)
    vectors[:1] = np.nan
    return SavedPassages(rows, vectors)


def assert_saved(session: SessionStore, expected: SavedPassages) -> None:
    found = session.passages()
    assert found.rows.tolist() == expected.rows.tolist()
    np.testing.assert_array_equal(found.vectors, expected.vectors)


def test_passages_are_saved_with_their_turn_and_go_with_it(tmp_path: Path) -> None:
    path, every = new(tmp_path), passages((0, 2), (2, 3), (4, 6))
    first = SavedPassages(every.rows[:1], every.vectors[:1])
    others = SavedPassages(every.rows[1:], every.vectors[1:])
    with SessionStore.open(path) as session:
        session.append(said("one"), rows_at(range(3)), head_at(3), first)
        session.append(said("two", start=1), rows_at(range(3, 6)), head_at(6), others)
    with SessionStore.open(path) as session:
        assert_saved(session, every)
        assert every.vectors[2].tobytes() in path.read_bytes()
        session.append([], rows_at(range(0)), head_at(3), extent=Extent(1, 3, 3))
        assert every.vectors[2].tobytes() not in path.read_bytes()
    with SessionStore.open(path) as session:
        assert_saved(session, passages((0, 2), (2, 3)))
        fewer = passages((0, 1))
        session.append(
            said("other"), rows_at(range(2)), head_at(2), fewer, extent=Extent(0, 0, 0, 0)
        )
    assert every.vectors[1].tobytes() not in path.read_bytes()
    with SessionStore.open(path) as session:
        found = session.passages()
        assert len(found.rows) == 1
        assert np.isnan(found.vectors).all()


def test_a_passage_that_gives_way_to_a_longer_one_leaves_a_file_that_opens(tmp_path: Path) -> None:
    path = new(tmp_path)
    with SessionStore.open(path) as session:
        session.append(said("one"), rows_at(range(3)), head_at(3), passages((0, 1), (1, 3)))
        longer = passages((0, 1), (1, 5))
        added = SavedPassages(longer.rows[1:], longer.vectors[1:])
        session.append([], rows_at(range(3, 5)), head_at(5), added, extent=Extent(passages=1))
    with SessionStore.open(path) as session:
        assert_saved(session, longer)


@pytest.mark.parametrize("change", ["end = 99", "end = 1", "vector = X'00'", "vector = X'0000'"])
def test_impossible_passages_and_changed_vectors_are_damage(tmp_path: Path, change: str) -> None:
    path = new(tmp_path, "one")
    with SessionStore.open(path) as session:
        session.append([], rows_at(range(0)), head_at(3), passages((0, 1), (1, 2), (2, 3)))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE passages SET {change} WHERE start = 1")
        connection.commit()
    assert "is damaged" in refusal(lambda: SessionStore.open(path))
    sum_again(path)  # as if it had been saved so
    with SessionStore.open(path) as session, pytest.raises(DamagedSessionError):
        session.passages()


@cache
def encoding() -> LoadedModel:
    model = babbler()
    return replace(model, encoder=random_encoder(model, (1,), 8))


def talk(model: LoadedModel, *texts: str) -> tuple[Session, Autosave]:
    chat = session(model, max_new_tokens=8, recall="meaning")
    saving = Autosave(chat)
    for text in texts:
        list(chat.ask(text))
        saving.save()
    return chat, saving


def resumed(saving: Autosave, model: LoadedModel) -> Session:
    saving.close_without_saving()
    assert saving._store is not None
    with SessionStore.open(saving._store.path) as store:
        again = session(model, recall="meaning")
        resume_session(again, store)
        return again


def found(chat: Session) -> tuple[list[Any], NDArray[np.float16]]:
    passages = chat.recall.passage_search.passages
    return passages.rows.tolist(), passages.vectors


@pytest.mark.usefixtures("own_home")
def test_a_killed_chat_finds_by_meaning_what_it_found_before() -> None:
    chat, saving = talk(encoding(), "My name is Anna. I live in Rome.", "Tell me a joke.")
    rows, vectors = found(chat)
    assert len(rows) == len(vectors) >= 4
    assert not np.isnan(vectors.astype(np.float32)).any()
    again = found(resumed(saving, encoding()))
    assert again[0] == rows
    assert again[1].tobytes() == vectors.tobytes()


@pytest.mark.usefixtures("own_home")
def test_vectors_go_with_an_undone_turn_and_with_an_erased_word() -> None:
    chat, saving = talk(encoding(), "My name is Anna. I live in Rome.", "Tell me a joke.")
    before = found(chat)[1].copy()
    chat.undo()
    saving.save()
    chat.erase("Anna")
    saving.save()
    assert saving._store is not None
    content = saving._store.path.read_bytes()
    assert not [one for one in (before[0], before[-1]) if one.tobytes() in content]
    list(chat.ask("Who am I?"))
    saving.save()
    rows, vectors = found(chat)
    again = found(resumed(saving, encoding()))
    assert again[0] == rows
    np.testing.assert_array_equal(again[1], vectors)
    assert np.isnan(again[1][0]).all()


@pytest.mark.usefixtures("own_home")
def test_vectors_of_another_encoder_are_not_used_and_soon_gone() -> None:
    chat, saving = talk(encoding(), "My name is Anna. I live in Rome.")
    other = replace(babbler(), encoder=random_encoder(babbler(), (2,), 8))
    before, again = found(chat)[1].copy(), resumed(saving, other)
    assert not found(again)[1].size
    assert saving._store is not None
    with SessionStore.open(saving._store.path) as store:
        saving = Autosave(again, store)
        list(again.ask("Tell me a joke."))
        saving.save()
        rows, vectors = found(again)
        saved = store.passages()
        assert saved.rows.tolist() == rows
        np.testing.assert_array_equal(saved.vectors, vectors)
        assert before[0].tobytes() not in store.path.read_bytes()
