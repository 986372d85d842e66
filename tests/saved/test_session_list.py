"""The session list: listing, finding, removing and exporting, and the lock of a session in use."""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import sys
import time
from contextlib import closing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import torch

from session_files import APPEND_FOREVER, Elsewhere, head_at, new, printed, refusal, rows_at, said
from sirchat.errors import DamagedSessionError, SessionInUseError
from sirchat.saved import session_list
from sirchat.saved.session_list import (
    copy_session,
    export_session,
    find_session,
    list_sessions,
    remove_session,
)
from sirchat.saved.store import Extent, SessionStore
from sirchat.text.transcript import parse_transcript


@pytest.mark.slow
def test_another_process_is_refused_in_one_line_until_the_session_is_closed(tmp_path: Path) -> None:
    code = """
try:
    SessionStore.open(path).close()
    print("open")
except SirchatError as error:
    print(error)
"""
    session = SessionStore.create(tmp_path, {})
    session.append(said("hi"), rows_at(range(3)), head_at(3))
    busy = printed(code, session.path)
    assert busy.startswith(f"{session.path} is in use by another process (")
    assert busy.endswith(f"a copy: sirchat --resume {session.id} --branch NAME)\n")
    session.close()
    with SessionStore.open(session.path) as session:
        busy = printed(code, session.path)
        assert busy.endswith(" --branch NAME)\n")
        session.append(said("ho"), rows_at(range(3)), head_at(3), extent=Extent(0, 0, 0, 0))
        list_sessions(tmp_path)
        assert "in use" in refusal(lambda: SessionStore.open(session.path))
        assert printed(code, session.path) == busy
    assert printed(code, session.path) == "open\n"


def copied_to_a_branch(path: Path) -> SessionStore:
    return copy_session(path.parent, path.stem, "branch")


@pytest.mark.slow
def test_a_list_shows_a_session_that_another_process_writes(tmp_path: Path) -> None:
    path = new(tmp_path, "turn 0")
    with Elsewhere(APPEND_FOREVER, path) as writer:
        try:
            writer.stdout.readline()
            for _ in range(10):
                (session,), refused = list_sessions(tmp_path)[:2]
                assert (session.id, session.in_use, refused) == (path.stem, True, [])
            for copied in (SessionStore.read, copied_to_a_branch) * 2:
                with suppress(SessionInUseError), copied(path) as copy:
                    turns, head = copy.turns(), copy.state_record()
                    assert [turn.index for turn in turns] == [*range(len(turns))]
                    assert head is not None
                    assert head.fields.get("turn", 0) == len(turns) - 1  # both of one moment
                    if copy.path != path:
                        copy.path.unlink()
            assert find_session(tmp_path, "last", may_be_open=True) == path
            told = refusal(lambda: find_session(tmp_path, "last"))
            assert told.startswith(f"the last chat, {path.stem}, is open in another process")
        finally:
            writer.kill()
    assert not list_sessions(tmp_path).sessions[0].in_use


def test_a_session_in_use_is_listed_as_it_was_saved_last(tmp_path: Path) -> None:
    with SessionStore.open(new(tmp_path, "one")) as session:
        session.append(said("two", start=1), rows_at(range(3, 6)), head_at(6))
        show = "s = list_sessions(path).sessions[0]\n"
        show += "print(s.turns, s.first_message, s.model, s.in_use)"
        assert printed(show, tmp_path) == "2 one tiny True\n"


def test_an_empty_session_is_listed_and_an_empty_or_missing_folder_has_no_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list_sessions(tmp_path / "missing") == ([], [])
    assert refusal(lambda: find_session(tmp_path, "last")).endswith(f"session in {tmp_path}")
    assert refusal(lambda: find_session(tmp_path, "x")).endswith("(no session is saved)")
    with monkeypatch.context() as patch:  # as if it had been killed
        patch.setattr("sirchat.saved.store.insert_record", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            SessionStore.create(tmp_path, {})
    assert len([*tmp_path.glob("*.sqlite")]) == 1
    assert list_sessions(tmp_path) == ([], [])
    SessionStore.create(tmp_path, {}).close()
    (session,) = list_sessions(tmp_path).sessions
    assert (session.model, session.turns, session.first_message) == ("", 0, "")
    path, file = new(tmp_path, "Grüße\n\x00", 'a "reply"'), io.BytesIO()
    assert find_session(tmp_path, "last") == path
    export_session(path, file)
    turns = [(turn.role, turn.content) for turn in parse_transcript(file.getvalue(), "t")]
    assert turns == [("user", "Grüße\n\x00"), ("assistant", 'a "reply"')]


def test_a_session_that_cannot_be_read_in_use_is_listed_by_its_name(tmp_path: Path) -> None:
    empty = tmp_path / "20251121-1433-aaaa.sqlite"  # as when another process has just created it
    empty.touch()
    with closing(sqlite3.connect(empty, isolation_level=None)) as newborn:
        newborn.execute("BEGIN EXCLUSIVE")
        (session,), refused = list_sessions(tmp_path)[:2]
    assert (session.id, session.in_use, session.turns, refused) == (empty.stem, True, 0, [])
    assert session.created == datetime(2025, 11, 21, 14, 33).astimezone()


def test_sessions_are_listed_by_when_they_were_written_to(tmp_path: Path) -> None:
    paths = [new(tmp_path, f"first\nof {name} " * 20, "yes", model=name) for name in "abc"]
    for age, path in zip((1, 3, 2), paths, strict=True):
        os.utime(path, (1.6e9 - age, 1.6e9 - age))
    sessions, refused = list_sessions(tmp_path)[:2]
    assert [session.model for session in sessions] == ["a", "c", "b"]
    newest = sessions[0]
    assert (newest.id, newest.path, newest.turns) == (paths[0].stem, paths[0], 2)
    assert newest.updated.timestamp() == 1.6e9 - 1
    assert abs(newest.created.timestamp() - time.time()) < 60
    assert newest.first_message.startswith("first of a first of a")
    assert newest.first_message.endswith("…")
    assert len(newest.first_message) == session_list._MAX_EXCERPT_CHARS
    assert not refused
    assert find_session(tmp_path, "last") == paths[0]


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
    for ident, told in (
        ("20261121-1432-a", f"{names[0]}, {names[1]} (give the id of one of them)"),
        ("20261121-1432-abbb", "did you mean 20261121-1432-aabb?"),
        *((unknown, "there is no saved session") for unknown in ("", "x", "1432-aab", "*")),
        ("../20261121", "there is no saved session"),
    ):
        assert told in refusal(partial(find_session, tmp_path, ident))


def test_the_last_session_is_the_newest_whose_file_tells_of_a_chat(tmp_path: Path) -> None:
    paths = whole, flipped, short = [new(tmp_path, "Hello", "Yes") for _ in range(3)]
    flipped.write_bytes(flipped.read_bytes().replace(b"Hello", b"Hellp"))
    short.write_bytes(short.read_bytes()[:5000])
    for n, path in enumerate(paths):
        os.utime(path, (n + 10, n + 10))
    before = {path: path.read_bytes() for path in paths}
    assert find_session(tmp_path, "last") == flipped
    with pytest.raises(DamagedSessionError, match=f"{flipped} is damaged") as damaged:
        SessionStore.open(flipped)
    assert f"sirchat sessions rm {flipped.stem}" in str(damaged.value)
    assert find_session(tmp_path, "last", own_id=flipped.stem) == whole
    assert {path: path.read_bytes() for path in paths} == before


def test_a_session_is_removed_with_all_its_files_unless_it_is_in_use(tmp_path: Path) -> None:
    other = new(tmp_path, "other")
    with SessionStore.open(new(tmp_path, "hi")) as session:
        session.kv.save({"keys": torch.ones(3)}, "stamp")
        code = "try: remove_session(path)\nexcept SirchatError as error: print(error)"
        assert "is in use by another process" in printed(code, session.path)
        assert session.kv.load("stamp") is not None
    session.path.with_suffix(".safetensors.new").touch()
    remove_session(session.path)
    assert list(tmp_path.iterdir()) == [other]
