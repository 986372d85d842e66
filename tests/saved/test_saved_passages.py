"""The passages of a chat, with their vectors, are saved and removed with its text."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from session_files import head_at, new, refusal, rows_at, said
from sirchat.errors import DamagedSessionError
from sirchat.saved.store import PASSAGE, SavedPassages, SessionStore


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
        session.truncate(1, 3, head_at(3))
        assert every.vectors[2].tobytes() not in path.read_bytes()
    with SessionStore.open(path) as session:
        assert_saved(session, passages((0, 2), (2, 3)))
        session.replace(said("other"), rows_at(range(2)), head_at(2), None, passages((0, 1)))
    assert every.vectors[1].tobytes() not in path.read_bytes()
    with SessionStore.open(path) as session:
        found = session.passages()
        assert len(found.rows) == 1
        assert np.isnan(found.vectors).all()


@pytest.mark.parametrize("change", ["end = 99", "end = 1", "vector = X'00'", "vector = X'0000'"])
def test_impossible_passages_are_damage(tmp_path: Path, change: str) -> None:
    path = new(tmp_path, "one")
    with SessionStore.open(path) as session:
        session.append([], rows_at(range(0)), head_at(3), passages((0, 1), (1, 2), (2, 3)))
        session._connection.execute(f"UPDATE passages SET {change} WHERE start = 1")
        with pytest.raises(DamagedSessionError):
            session.passages()


def test_a_changed_vector_is_damage(tmp_path: Path) -> None:
    path = new(tmp_path, "one")
    with SessionStore.open(path) as session:
        session.append([], rows_at(range(0)), head_at(3), passages((0, 1), (1, 2)))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE passages SET vector = zeroblob(8) WHERE start = 1")
        connection.commit()
    assert "is damaged" in refusal(lambda: SessionStore.open(path))
