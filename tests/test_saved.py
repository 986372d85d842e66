"""Saved sessions: whole after every turn, whatever kills the writer, and for one process at a time.

The files of an open session are read by other processes here: in this one, closing such a file
would drop the session's lock.
"""

from __future__ import annotations

import inspect
import io
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sirchat.saved import files, keys_values, shelf
from sirchat.saved.shelf import (
    export_session,
    find_session,
    list_sessions,
    remove_session,
)
from sirchat.saved.store import FORMAT, Head, SavedTurn, SessionError, SessionStore
from sirchat.transcript import read_transcript

ROW = np.dtype(
    [("token_id", np.int32), ("surprisal", np.float32), ("decay", np.float64), ("flags", np.uint8)],
    align=True,  # as the ledger's, with gaps
)
SECRET = "correct horse battery staple"
ROOT = Path(__file__).parent.parent
PRELUDE = """
from __future__ import annotations
import os, sys
from pathlib import Path
import numpy as np
from sirchat.errors import *
from sirchat.saved.shelf import *
from sirchat.saved.store import *
path, ROW = Path(sys.argv[1]), np.dtype(
    [("token_id", np.int32), ("surprisal", np.float32), ("decay", np.float64), ("flags", np.uint8)],
    align=True,
)
"""


def rows_at(positions: range) -> NDArray[Any]:
    """Rows that tell their position; the first has no surprisal."""
    at = np.arange(positions.start, positions.stop)
    rows = np.zeros(len(at), ROW)
    rows["token_id"], rows["surprisal"], rows["decay"] = at, at / 7, -at / 3
    rows["surprisal"][at == 0] = np.nan
    rows["flags"] = at % 256
    return rows


def head_at(seen: int, logits: list[float] | None = None, **fields: Any) -> Head:
    """A head that holds every second token."""
    held = np.arange(0, seen, 2, dtype=np.int64)
    return Head(seen, held, None if logits is None else np.array(logits, np.float32), fields)


def said(*texts: str, start: int = 0) -> list[SavedTurn]:
    """Turns of the user and the assistant, one after the other."""
    roles = ("user", "assistant")
    return [SavedTurn(i, roles[i % 2], text, "stop") for i, text in enumerate(texts, start)]


def new(folder: Path, *texts: str, model: str = "tiny") -> Path:
    """A session of three tokens a turn, closed."""
    with SessionStore.create(folder, {"model": model}) as session:
        seen = 3 * len(texts)
        session.append(said(*texts), rows_at(range(seen)), head_at(seen))
        return session.path


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(SessionError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def elsewhere(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another Python process that runs `code`, with what it may need imported."""
    shared = [inspect.getsource(function) for function in (rows_at, head_at, said)]
    command = [sys.executable, "-c", "\n".join([PRELUDE, *shared, code]), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def printed(code: str, *arguments: object) -> str:
    """What another process prints that runs to its end."""
    with elsewhere(code, *arguments) as process:
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return shown


def columns(rows: NDArray[Any]) -> list[bytes]:
    """The bytes of every field: NaNs compare, gaps don't."""
    return [rows[name].tobytes() for name in rows.dtype.names or ()]


# What is written comes back.

texts = st.text(max_size=40)
numbers = st.floats(width=32)
heads = st.fixed_dictionaries(
    {"log_decay": st.floats(allow_nan=False), "profile": st.dictionaries(texts, texts, max_size=2)}
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(texts, max_size=3), st.integers(0, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 9), st.integers(0, 30)),
        st.tuples(st.just("replace"), st.lists(texts, max_size=3), st.integers(0, 9)),
        st.tuples(st.just("save_head"), st.none(), st.none()),
        st.tuples(st.just("reopen"), st.none(), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(steps, heads, st.none() | st.lists(numbers, max_size=5))
@example([("append", ["a", "b"], 5), ("append", ["c"], 4), ("truncate", 1, 3)], {}, [0.5])
def test_any_turns_rows_and_heads_come_back_after_undo_rewriting_and_reopening(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[str, Any, Any]],
    fields: dict[str, Any],
    logits: list[float] | None,
) -> None:
    session = SessionStore.create(tmp_path_factory.mktemp("saved"), {"model": "tiny"})
    turns, seen, head = list[SavedTurn](), 0, None
    for number, (step, what, count) in enumerate(plan):
        head = head if step == "reopen" else head_at(seen, logits, **fields, number=number)
        match step:
            case "append":
                new_turns = said(*what, start=len(turns))
                head = head_at(seen + count, logits, **fields, number=number)
                session.append(new_turns, rows_at(range(seen, seen + count)), head)
                turns, seen = turns + new_turns, seen + count
            case "truncate":
                turns, seen = turns[:what], min(seen, count)
                head = head_at(seen, logits, **fields, number=number)
                session.truncate(what, seen, head)
            case "replace":
                turns, seen = said(*what), count
                head = head_at(seen, logits, **fields, number=number)
                session.replace(turns, rows_at(range(seen)), head)
            case "save_head":
                head = head_at(seen, logits, **fields, number=number)
                session.save_head(head)
            case "reopen":
                session.close()
                session = SessionStore.open(session.path)
        check(session, turns, seen, head)
    session.close()


def check(session: SessionStore, turns: list[SavedTurn], seen: int, head: Head | None) -> None:
    assert session.meta == {"model": "tiny"}
    assert session.turns() == turns
    assert columns(session.rows(ROW)) == columns(rows_at(range(seen)))
    assert session.rows(ROW).dtype == ROW
    found = session.head()
    if head is None or found is None:
        assert head is found is None
        return
    assert (found.seen, found.fields) == (seen, head.fields)
    assert found.held.dtype == np.int64
    assert found.held.tolist() == head.held.tolist()
    assert (found.logits is None) == (head.logits is None)
    if found.logits is not None and head.logits is not None:
        assert found.logits.dtype == np.float32
        assert found.logits.tobytes() == head.logits.tobytes()


def test_what_a_session_holds_can_be_changed_after_it_was_read(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        session.rows(ROW)["flags"][0] = 1
        head = session.head()
        assert head is not None
        head.held[0] = 1


def test_rows_of_other_fields_are_refused(tmp_path: Path) -> None:
    other = np.dtype([("token_id", np.int32), ("surprisal", np.float64)])
    with SessionStore.open(new(tmp_path, "one")) as session:
        assert "other fields" in refusal(lambda: session.rows(other))
        assert "other fields" in refusal(lambda: session.append([], np.zeros(2, other), head_at(5)))
        assert len(session.rows(ROW)) == 3


def test_a_turn_that_does_not_fit_the_rows_leaves_nothing_behind(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        for act in (
            lambda: session.append(said("two", start=1), rows_at(range(3, 5)), head_at(4)),
            lambda: session.truncate(0, 4, head_at(4)),
            lambda: session.truncate(0, 1, head_at(2)),
            lambda: session.replace(said("two"), rows_at(range(5)), head_at(4)),
            lambda: session.save_head(head_at(2)),
        ):
            with pytest.raises(ValueError, match=r"rows|tokens"):
                act()
        assert "UNIQUE" in refusal(
            lambda: session.append(said("again"), rows_at(range(3, 4)), head_at(4))
        )
        assert session.turns() == said("one")
        assert len(session.rows(ROW)) == 3


def test_ids_sort_by_time_and_none_is_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = iter("aaaa" + "aaaa" + "bbbb")
    monkeypatch.setattr(files.secrets, "choice", lambda _: next(letters))
    clock = SimpleNamespace(strftime=lambda _: "20261121-1432", time=time.time)
    monkeypatch.setattr(files, "time", clock)
    ids = [new(tmp_path, "hi").stem for _ in range(2)]
    assert ids == ["20261121-1432-aaaa", "20261121-1432-bbbb"]


# Nothing that was returned is lost.

APPEND_FOREVER = """
with SessionStore.open(path) as session:
    turn, seen = len(session.turns()), session.head().seen
    while True:
        more = turn % 5
        text = f"turn {turn} " * (turn % 4 * 200)
        rows, head = rows_at(range(seen, seen + more)), head_at(seen + more, turn=turn)
        session.append(said(text, start=turn), rows, head)
        print(turn, flush=True)
        turn, seen = turn + 1, seen + more
"""


def test_every_turn_that_was_saved_survives_kill_nine(tmp_path: Path) -> None:
    path, moments, last = new(tmp_path, "turn 0"), random.Random(1), 0
    for _ in range(20):
        with elsewhere(APPEND_FOREVER, path) as writer:
            assert writer.stdout
            first = int(writer.stdout.readline())
            time.sleep(moments.uniform(0, 0.05))
            writer.kill()
            last = max([first, *(int(line) for line in writer.stdout.read().split())])
        with SessionStore.open(path) as session:
            turns, head = session.turns(), session.head()
            assert head is not None
            assert len(turns) in (last + 1, last + 2)  # the next may be there and not yet printed
            assert [turn.index for turn in turns] == list(range(len(turns)))
            assert all(
                turn.text == f"turn {turn.index} " * (turn.index % 4 * 200) for turn in turns[1:]
            )
            assert head.fields == {"turn": turns[-1].index}
            assert head.seen == 3 + sum(turn.index % 5 for turn in turns[1:])
            assert columns(session.rows(ROW)) == columns(rows_at(range(head.seen)))
    assert last > 40


DIE_INSIDE_A_TURN = """
class Deadly:
    def __array__(self, *_, **__):
        os.kill(os.getpid(), 9)
session = SessionStore.open(path)
turn = SavedTurn(1, "assistant", "x" * 10_000_000, "stop")
session.append([turn], np.zeros(0), Head(3, np.zeros(0, np.int64), Deadly(), {}))
"""


@pytest.fixture
def broken_off(tmp_path: Path) -> Path:
    """A session whose writer was killed while half of a turn was in the file."""
    path = new(tmp_path, "one")
    with elsewhere(DIE_INSIDE_A_TURN, path) as writer:
        pass
    assert writer.returncode == -signal.SIGKILL
    assert path.with_suffix(".sqlite-journal").stat().st_size
    assert path.stat().st_size > 5_000_000
    return path


def test_a_turn_that_a_crash_broke_off_is_taken_back(broken_off: Path) -> None:
    with SessionStore.open(broken_off) as session:
        assert session.turns() == said("one")
        assert columns(session.rows(ROW)) == columns(rows_at(range(3)))


def test_a_session_that_a_crash_broke_off_is_listed_and_not_written_to(broken_off: Path) -> None:
    before = broken_off.read_bytes()
    sessions, refused = list_sessions(broken_off.parent)
    assert ([session.id for session in sessions], refused) == ([broken_off.stem], [])
    assert not sessions[0].in_use
    assert broken_off.read_bytes() == before


def test_a_disk_that_is_full_costs_the_turn_and_not_the_session(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        session._connection.execute("PRAGMA max_page_count=20")
        turn = said("x" * 200_000, start=1)
        assert "full" in refusal(lambda: session.append(turn, rows_at(range(3, 6)), head_at(6)))
        session.append(said("two", start=1), rows_at(range(3, 6)), head_at(6))
        assert session.turns() == said("one", "two")


# One process at a time.


def test_another_process_is_refused_in_one_line_until_the_session_is_closed(tmp_path: Path) -> None:
    code = """
try:
    SessionStore.open(path).close()
    print("open")
except SirchatError as error:
    print(error)
"""
    session = SessionStore.create(tmp_path, {})
    busy = f"{session.path} is in use by another process (close the other chat first)\n"
    assert printed(code, session.path) == busy
    session.append(said("hi"), rows_at(range(3)), head_at(3))
    assert printed(code, session.path) == busy
    session.close()
    with SessionStore.open(session.path) as session:
        assert printed(code, session.path) == busy
        session.replace(said("ho"), rows_at(range(3)), head_at(3))
        assert printed(code, session.path) == busy
        list_sessions(tmp_path)
        assert printed(code, session.path) == busy
        assert "in use" in refusal(lambda: SessionStore.open(session.path))
        assert printed(code, session.path) == busy
    assert printed(code, session.path) == "open\n"


def test_a_list_shows_a_session_that_another_process_writes(tmp_path: Path) -> None:
    path = new(tmp_path, "turn 0")
    with elsewhere(APPEND_FOREVER, path) as writer:
        try:
            assert writer.stdout
            writer.stdout.readline()
            for _ in range(100):
                (session,), refused = list_sessions(tmp_path)
                assert (session.id, session.in_use, refused) == (path.stem, True, [])
            assert find_session(tmp_path, "last") == path
        finally:
            writer.kill()
            writer.communicate()
    assert not list_sessions(tmp_path).sessions[0].in_use


def test_a_session_in_use_is_listed_with_what_was_saved_last(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        session.append(said("two", start=1), rows_at(range(3, 6)), head_at(6))
        show = "s = list_sessions(path).sessions[0]; print(s.turns, s.first, s.model, s.in_use)"
        assert printed(show, tmp_path) == "2 one tiny True\n"


def test_a_session_that_cannot_be_read_in_use_is_listed_by_its_name(tmp_path: Path) -> None:
    empty = tmp_path / "20251121-1433-aaaa.sqlite"  # as another process is about to fill it
    empty.touch()
    with closing(sqlite3.connect(empty, isolation_level=None)) as newborn:
        newborn.execute("BEGIN EXCLUSIVE")
        (session,), refused = list_sessions(tmp_path)
    assert (session.id, session.in_use, session.turns, refused) == (empty.stem, True, 0, [])
    assert session.created == datetime(2025, 11, 21, 14, 33).astimezone()


# Only the owner reads it, and what is forgotten is gone.


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_folder_and_files_are_private_while_open_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "sessions"
    with SessionStore.create(folder, {}) as session:
        session.append(said("hi"), rows_at(range(3)), head_at(3))
        session.save_kv({"keys": torch.ones(2)}, "stamp")
        suffixes = {".sqlite", ".sqlite-journal", ".safetensors"}
        assert {path.suffix for path in folder.iterdir()} == suffixes
        assert modes(folder) == {0o600}
        session.replace(said("ho"), rows_at(range(3)), head_at(3))
        assert modes(folder) == {0o600}
    assert [path.suffix for path in folder.iterdir()] == [".sqlite"]
    assert modes(folder) == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


def written_over(tensors: object, path: Path, metadata: object) -> None:
    path.write_bytes(b"")


def written_anew(tensors: object, path: Path, metadata: object) -> None:
    path.unlink()
    path.write_bytes(b"")


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("library", [written_over, written_anew])
def test_keys_and_values_are_private_however_the_library_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Callable[..., None]
) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", library)
    with SessionStore.create(tmp_path / "saved", {}) as session:
        session.save_kv({}, "stamp")
        assert modes(tmp_path / "saved") == {0o600}


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def everything_in(folder: Path) -> bytes:
    return b"\n".join(path.name.encode() + path.read_bytes() for path in folder.iterdir())


spoken = st.lists(st.tuples(st.integers(0, 9000), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=40)
@given(spoken, st.integers(0, 3))
@example([(5, True), (9000, True), (0, True), (4000, True)], 1)
def test_what_is_forgotten_is_in_no_file(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, bool]], undone: int
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    texts = [f"{'a' * size}{SECRET if secret else ''}{'b' * (size // 2)}" for size, secret in plan]
    with SessionStore.create(folder, {}) as session:
        for index, text in enumerate(texts):
            rows, head = rows_at(range(3 * index, 3 * index + 3)), head_at(3 * index + 3, text=text)
            session.append(said(text, start=index), rows, head)
            session.save_kv({"keys": torch.ones(2)}, text)
        kept = max(0, len(texts) - undone)
        session.truncate(kept, 3 * kept, head_at(3 * kept, text=SECRET))
        assert SECRET.encode() in everything_in(folder)
        clean = [text.replace(SECRET, "") for text in texts[:kept]]
        session.replace(said(*clean), rows_at(range(3 * kept)), head_at(3 * kept))
        assert SECRET.encode() not in everything_in(folder)
        assert session.turns() == said(*clean)
        assert session.load_kv(texts[-1]) is None
    assert SECRET.encode() not in everything_in(folder)


def test_what_is_taken_back_is_overwritten(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        session.append(said(SECRET, start=1), rows_at(range(3, 6)), head_at(6))
        session.truncate(1, 3, head_at(3))
        assert SECRET.encode() not in everything_in(tmp_path)


def test_between_turns_nothing_is_outside_the_one_file(tmp_path: Path) -> None:
    with SessionStore.create(tmp_path, {}) as session:
        for index, text in enumerate([SECRET, "two", "three"]):
            seen = 3 * index
            session.append(
                said(text, start=index), rows_at(range(seen, seen + 3)), head_at(seen + 3)
            )
            sizes = {path.suffix: path.stat().st_size for path in tmp_path.iterdir()}
            assert sizes.pop(".sqlite")
            assert sizes == {".sqlite-journal": 0}


def test_an_erasure_that_a_crash_broke_off_is_finished_when_the_session_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new(tmp_path, *[f"{number} {SECRET}" * 100 for number in range(40)])
    with monkeypatch.context() as patch, SessionStore.open(path) as session:
        patch.setattr(SessionStore, "_finish_erasing", lambda _: None)
        session.replace(said("clean"), rows_at(range(3)), head_at(3))
    before = path.stat().st_size
    for _ in range(2):
        with SessionStore.open(path) as session:
            assert session.turns() == said("clean")
    assert path.stat().st_size < before / 4
    assert SECRET.encode() not in everything_in(tmp_path)


# Keys and values beside it.


def test_keys_and_values_come_back_for_their_stamp_only(tmp_path: Path) -> None:
    store_of = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {"keys": store_of[:, :2], "values": torch.ones(2, 2, dtype=torch.bfloat16)}
    with SessionStore.create(tmp_path, {}) as session:
        assert session.load_kv("7 tokens") is None
        session.save_kv(tensors, "7 tokens")
        assert session.load_kv("8 tokens") is None
        loaded = session.load_kv("7 tokens")
        assert loaded is not None
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
        session.save_kv({}, "8 tokens")
        assert torch.equal(loaded["keys"], tensors["keys"])  # a newer file does not reach into it
        assert session.load_kv("8 tokens") == {}
        session.drop_kv()
        session.drop_kv()
        assert session.load_kv("8 tokens") is None


@pytest.mark.parametrize("kept", [0, 4, 30, 0.5, -1])
def test_half_a_file_of_keys_and_values_counts_as_none(tmp_path: Path, kept: float) -> None:
    with SessionStore.create(tmp_path, {}) as session:
        session.save_kv({"keys": torch.ones(100)}, "stamp")
        file = session.path.with_suffix(".safetensors")
        whole = file.read_bytes()
        file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
        assert session.load_kv("stamp") is None


def test_keys_and_values_that_cannot_be_written_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with SessionStore.create(tmp_path, {}) as session:
        session.save_kv({"keys": torch.ones(3)}, "old")
        monkeypatch.setattr(keys_values, "sync", fail)
        assert "No space" in refusal(lambda: session.save_kv({"keys": torch.ones(3)}, "new"))
        assert session.load_kv("old") is not None
    assert not list(tmp_path.glob("*.new"))


def test_keys_and_values_that_a_crash_broke_off_are_cleared_away(tmp_path: Path) -> None:
    path = new(tmp_path, "one")
    unfinished = path.with_suffix(".safetensors.new")
    unfinished.write_bytes(b"half")
    SessionStore.open(path).close()
    assert not unfinished.exists()


# Files that are no sessions.


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE turns (turn INTEGER)")
        connection.commit()


def newer(path: Path) -> None:
    shutil.copy(new(path.parent / "elsewhere", "hi"), path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={FORMAT + 1}")


def cut_short(path: Path) -> None:
    whole = new(path.parent / "elsewhere", "hi" * 20_000).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


REFUSED = {
    "empty": (lambda path: path.write_bytes(b""), "is not a saved session of sirchat"),
    "text": (
        lambda path: path.write_text("Dear diary\n" * 500),
        "is not a saved session of sirchat",
    ),
    "foreign": (foreign_database, "is not a saved session of sirchat"),
    "newer": (newer, f"has format {FORMAT + 1}, and this sirchat reads formats up to {FORMAT}"),
    "damaged": (cut_short, "is damaged"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_no_whole_session_is_refused_and_left_alone(
    tmp_path: Path, kind: str
) -> None:
    make, problem = REFUSED[kind]
    good, bad = new(tmp_path, "hello"), tmp_path / "20261121-1432-bad.sqlite"
    make(bad)
    before = bad.read_bytes()
    assert refusal(lambda: SessionStore.open(bad)).startswith(f"{bad} {problem}")
    sessions, refused = list_sessions(tmp_path)
    assert [session.path for session in sessions] == [good]
    assert [str(error).startswith(f"{bad} {problem}") for error in refused] == [True]
    assert bad.read_bytes() == before
    assert find_session(tmp_path, "last") == good


def test_a_session_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "none.sqlite"
    for act in (SessionStore.open, remove_session, lambda path: export_session(path, io.BytesIO())):
        assert refusal(lambda act=act: act(path)) == f"there is no saved session {path}"  # type: ignore[misc]
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "sessions"
    problem = refusal(lambda: SessionStore.create(folder, {}))
    assert problem.startswith(f"no session can be saved in {folder}: ")
    assert list_sessions(folder) == ([], [])


def test_damage_is_found_when_a_session_is_opened_and_not_when_it_is_read(tmp_path: Path) -> None:
    path = new(tmp_path, *("x" * 9000 for _ in range(9)))
    content = bytearray(path.read_bytes())
    for page in range(1, len(content) // 4096):
        broken = content.copy()
        broken[4096 * page : 4096 * page + 8] = b"\xff" * 8
        path.write_bytes(broken)
        if content[4096 * page] in (5, 13):  # a page of a table; others hold long values
            assert "is damaged" in refusal(lambda: SessionStore.open(path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session that nothing is wrong with."""
    return new(tmp_path_factory.mktemp("whole"), "hello", "x" * 9000, "bye")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=4))
def test_any_damage_is_read_over_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, damage: list[tuple[int, int]]
) -> None:
    path, content = tmp_path_factory.mktemp("saved") / whole.name, bytearray(whole.read_bytes())
    telling = [at for at, byte in enumerate(content) if byte not in b"\0x"]
    for number, change in damage:
        content[telling[number % len(telling)]] ^= change
    path.write_bytes(content)
    sessions, refused = list_sessions(path.parent)
    assert len(sessions) + len(refused) == 1
    assert "\n" not in (problem_of(path) or "")


def problem_of(path: Path) -> str | None:
    try:
        with SessionStore.open(path) as session:
            session.turns(), session.rows(ROW), session.head()
    except SessionError as error:
        return str(error)
    return None


# The shelf.


def test_sessions_are_listed_by_when_they_were_written_to(tmp_path: Path) -> None:
    paths = [new(tmp_path, f"first\nof {name} " * 20, "yes", model=name) for name in "abc"]
    for age, path in zip((1, 3, 2), paths, strict=True):
        os.utime(path, (1.6e9 - age, 1.6e9 - age))
    sessions, refused = list_sessions(tmp_path)
    assert [session.model for session in sessions] == ["a", "c", "b"]
    newest = sessions[0]
    assert (newest.id, newest.path, newest.turns) == (paths[0].stem, paths[0], 2)
    assert newest.updated.timestamp() == 1.6e9 - 1
    assert abs(newest.created.timestamp() - time.time()) < 60
    assert newest.first.startswith("first of a first of a")
    assert newest.first.endswith("…")
    assert len(newest.first) == shelf._FIRST_LINE
    assert not refused
    assert find_session(tmp_path, "last") == paths[0]


def test_an_empty_session_and_a_missing_folder_are_listed(tmp_path: Path) -> None:
    SessionStore.create(tmp_path, {}).close()
    ((session,), _) = list_sessions(tmp_path)
    assert (session.model, session.turns, session.first) == ("", 0, "")
    assert list_sessions(tmp_path / "missing") == ([], [])


def test_a_session_is_found_by_its_id_or_how_it_begins(tmp_path: Path) -> None:
    session = new(tmp_path, "hi")
    names = ["20261121-1432-aaaa", "20261121-1432-aabb", "20261121-1432"]
    paths = [tmp_path / f"{name}.sqlite" for name in names]
    for path in paths:
        shutil.copy(session, path)
    session.unlink()
    assert find_session(tmp_path, "20261121-1432-aaaa") == paths[0]
    assert find_session(tmp_path, "20261121-1432-aab") == paths[1]
    assert find_session(tmp_path, "20261121-1432") == paths[2]
    several = refusal(lambda: find_session(tmp_path, "20261121-1432-a"))
    assert several.endswith(f'"20261121-1432-a": {names[0]}, {names[1]}')
    assert "did you mean 20261121-1432-aabb?" in refusal(
        lambda: find_session(tmp_path, "20261121-1432-abbb")
    )
    for unknown in ("", "x", "1432-aab", "../20261121", "*"):
        assert "there is no saved session" in refusal(lambda i=unknown: find_session(tmp_path, i))  # type: ignore[misc]


def test_there_is_no_last_session_in_an_empty_folder(tmp_path: Path) -> None:
    assert refusal(lambda: find_session(tmp_path, "last")).endswith(f"session in {tmp_path}")
    assert refusal(lambda: find_session(tmp_path, "x")).endswith("(none is saved)")


def test_a_session_is_removed_with_all_its_files_unless_it_is_in_use(tmp_path: Path) -> None:
    other = new(tmp_path, "other")
    with SessionStore.open(new(tmp_path, "hi")) as session:
        session.save_kv({"keys": torch.ones(3)}, "stamp")
        code = "try: remove_session(path)\nexcept SirchatError as error: print(error)"
        assert "is in use by another process" in printed(code, session.path)
        assert session.load_kv("stamp") is not None
    session.path.with_suffix(".safetensors.new").touch()
    remove_session(session.path)
    assert list(tmp_path.iterdir()) == [other]


def test_a_broken_session_can_be_removed_and_a_foreign_file_cannot(broken_off: Path) -> None:
    remove_session(broken_off)
    assert not list(broken_off.parent.iterdir())
    for make in (cut_short, newer, lambda path: path.touch()):
        make(broken_off)
        remove_session(broken_off)
        assert not broken_off.exists()
    foreign_database(broken_off)
    assert "is not a saved session" in refusal(lambda: remove_session(broken_off))
    assert broken_off.exists()


def test_a_session_is_exported_as_json_lines(tmp_path: Path) -> None:
    path, file = new(tmp_path, "Grüße\n\x00", 'a "reply"'), io.BytesIO()
    export_session(path, file)
    turns = read_transcript(file.getvalue(), "t")
    assert [(turn.role, turn.content) for turn in turns] == [
        ("user", "Grüße\n\x00"),
        ("assistant", 'a "reply"'),
    ]
