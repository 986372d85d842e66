"""Saved sessions survive a killed writer and a full disk; damaged and other files are refused."""

from __future__ import annotations

import io
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from session_files import (
    APPEND_FOREVER,
    ROW,
    Elsewhere,
    columns,
    new,
    refusal,
    rows_at,
    said,
)
from sirchat.saved.database import FORMAT_VERSION
from sirchat.saved.session_list import (
    copy_session,
    export_session,
    find_session,
    list_sessions,
    remove_session,
)
from sirchat.saved.store import SessionStore


@pytest.mark.slow
def test_every_turn_that_was_saved_survives_kill_nine(tmp_path: Path) -> None:
    path, moments, last = new(tmp_path, "turn 0"), random.Random(1), 0
    for _ in range(8):
        with Elsewhere(APPEND_FOREVER, path) as writer:
            first = int(writer.stdout.readline())
            time.sleep(moments.uniform(0, 0.05))
            writer.kill()
            last = max([first, *(int(line) for line in writer.stdout.read().split())])
        with SessionStore.open(path) as session:
            turns, head = session.turns(), session.state_record()
            assert head is not None
            assert len(turns) in (last + 1, last + 2)  # the next may be there and not yet printed
            assert [turn.index for turn in turns] == list(range(len(turns)))
            assert all(
                turn.text == f"turn {turn.index} " * (turn.index % 4 * 200) for turn in turns[1:]
            )
            assert head.fields == {"turn": turns[-1].index}
            assert head.seen == 3 + sum(turn.index % 5 for turn in turns[1:])
            assert columns(session.rows(ROW)) == columns(rows_at(range(head.seen)))
    assert last > 8


DIE_INSIDE_A_TURN = """
class Deadly:
    def __array__(self, *_, **__):
        os.kill(os.getpid(), 9)
session = SessionStore.open(path)
turn = SavedTurn(1, "assistant", "x" * 10_000_000, "stop")
session.append([turn], np.zeros(0), StateRecord(3, np.zeros(0, np.int64), Deadly(), {}))
"""


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A session whose writer was killed while half of a turn was in the file."""
    path = new(tmp_path, "one")
    with Elsewhere(DIE_INSIDE_A_TURN, path) as writer:
        pass
    assert writer.returncode == -signal.SIGKILL
    assert path.with_suffix(".sqlite-journal").stat().st_size
    assert path.stat().st_size > 5_000_000
    return path


def test_a_session_that_a_crash_interrupted_is_listed_unwritten_and_opened_rolled_back(
    interrupted: Path,
) -> None:
    before = interrupted.read_bytes()
    sessions, refused = list_sessions(interrupted.parent)[:2]
    assert ([session.id for session in sessions], refused) == ([interrupted.stem], [])
    assert not sessions[0].in_use
    assert interrupted.read_bytes() == before
    with copy_session(interrupted.parent, interrupted.stem, "branch") as session:
        assert session.turns() == said("one")
    with SessionStore.open(interrupted) as session:
        assert session.turns() == said("one")
        assert columns(session.rows(ROW)) == columns(rows_at(range(3)))


# Files that are not sessions.


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE turns (turn INTEGER)")
        connection.commit()


def of_format(path: Path, version: int) -> None:
    shutil.copy(new(path.parent / "elsewhere", "hi"), path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={version}")


NEXT, LAST = FORMAT_VERSION + 1, FORMAT_VERSION - 1
newer, older = (partial(of_format, version=version) for version in (NEXT, LAST))


def cut_short(path: Path) -> None:
    whole = new(path.parent / "elsewhere", "hi" * 20_000).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


NONE = "is not a saved session of sirchat"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), NONE),
    "text": (lambda path: path.write_text("Dear diary\n" * 500), NONE),
    "foreign": (foreign_database, NONE),
    "newer": (newer, f"has format {NEXT}, but this sirchat reads 7 (install a newer version"),
    "older": (older, f"has format {LAST}, but this sirchat reads 7 (install an older version"),
    "damaged": (cut_short, "is damaged"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_not_a_valid_session_is_refused_and_left_alone(
    tmp_path: Path, kind: str
) -> None:
    make, problem = REFUSED[kind]
    good, bad = new(tmp_path, "hello"), tmp_path / "20261121-1432-bad.sqlite"
    make(bad)
    before = bad.read_bytes()
    assert refusal(lambda: SessionStore.open(bad)).startswith(f"{bad} {problem}")
    sessions, refused = list_sessions(tmp_path)[:2]
    assert [session.path for session in sessions] == [good]
    # An empty file has nothing to lose: a process that was killed as it began a chat leaves one.
    told = [str(error).startswith(f"{bad} {problem}") for error in refused]
    assert told == [True] * (kind != "empty")
    assert bad.read_bytes() == before
    assert find_session(tmp_path, "last") == good


def test_a_session_or_folder_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "none.sqlite"
    for act in (SessionStore.open, remove_session, lambda path: export_session(path, io.BytesIO())):
        assert refusal(lambda act=act: act(path)) == f"there is no saved session {path}"  # type: ignore[misc]
    assert not path.exists()
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "sessions"
    problem = refusal(lambda: SessionStore.create(folder, {}))
    assert problem.startswith(f"no session can be saved in {folder}: ")
    assert list_sessions(folder) == ([], [])


def test_a_broken_session_can_be_removed_and_a_foreign_file_cannot(interrupted: Path) -> None:
    remove_session(interrupted)
    assert not list(interrupted.parent.iterdir())
    for make in (cut_short, newer, lambda path: path.touch()):
        make(interrupted)
        remove_session(interrupted)
        assert not interrupted.exists()
    foreign_database(interrupted)
    assert "is not a saved session" in refusal(lambda: remove_session(interrupted))
    assert interrupted.exists()
