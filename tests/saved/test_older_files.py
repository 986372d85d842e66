"""Chats of format 4, and one of format 5 with a column that is gone, go on as they did there.

`golden/saved-chats` was written in November 2026: three chats with evictions, recall and pins, and
the search index of two. That of `tiny` has a name, a summary and two system prompts, and its
program was killed; that of `babbler` has keys and values.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from chatting import answer, babbler, tiny
from sirchat.chat.session import Session
from sirchat.errors import DamagedSessionError
from sirchat.memory.ledger import Flag
from sirchat.saved.autosave import Autosave
from sirchat.saved.database import record_sum
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.search import search_sessions
from sirchat.saved.session_list import find_session, list_sessions, remove_session
from sirchat.saved.store import SessionStore

GOLDEN = Path(__file__).parents[1] / "golden" / "saved-chats"
CHATS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
MODELS = {"tiny": tiny, "babbler": babbler, "learned": tiny}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / "chats.zip") as files:
        files.extractall(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", CHATS)
def test_an_older_chat_goes_on_with_the_same_rows_pins_and_next_reply(
    folder: Path, model: str
) -> None:
    expected = CHATS[model]
    path = folder / f"{expected['id']}.sqlite"
    for _ in range(2):  # as it was written, then converted
        with SessionStore.open(path) as store:
            head = store.head()
            assert head is not None
            assert (store.kv.load(head.fields["kv"]) is not None) == (model == "babbler")
            session = Session(MODELS[model](), saved_profile(store))
            resume_session(session, store)
        assert [[turn.role, turn.text] for turn in session.turns] == expected["turns"]
        rows, flags = session.save().rows, session.ledger.column("flags")
        assert session.seen == expected["seen"]
        assert session.save().held.tolist() == expected["held"]
        assert session.ledger.pinned_positions.tolist() == expected["pinned"]
        assert np.flatnonzero(flags & Flag.EXCLUDED).tolist() == expected["excluded"]
        assert {name: crc32(rows[name].tobytes()) for name in expected["rows"]} == expected["rows"]
    assert session.profile.policy != "learned"
    assert answer(list(session.ask("Where does Anna live now?"))) == expected["next"]
    assert session.save().held.tolist() == expected["held_after"]


def test_an_older_chat_that_is_only_looked_at_is_no_newer(folder: Path) -> None:
    paths = [folder / f"{chat['id']}.sqlite" for chat in CHATS.values()]
    for age, path in enumerate(paths):
        os.utime(path, ns=(0, 10**18 - age * 10**9))
    newest = [entry.id for entry in list_sessions(folder).sessions]
    for path in paths:
        SessionStore.open(path).close()
    assert [entry.id for entry in list_sessions(folder).sessions] == newest
    with SessionStore.open(paths[-1]) as store:
        store.rename("boat")
    assert list_sessions(folder).sessions[0].id == paths[-1].stem


def test_an_older_chat_is_saved_on_with_its_pins(folder: Path) -> None:
    path = folder / f"{CHATS['tiny']['id']}.sqlite"
    with SessionStore.open(path) as store:
        session = Session(tiny(), saved_profile(store))
        resume_session(session, store)
        saving = Autosave(session, store)
        list(session.pin("Oslo"))
        list(session.read_user("Where does Anna live now?"))
        saving.save()
    with SessionStore.open(path) as store:
        again = Session(tiny(), saved_profile(store))
        resume_session(again, store)
    assert again.turns == session.turns
    flags = [chat.ledger.column("flags") & ~np.uint8(Flag.RECALLED) for chat in (again, session)]
    assert flags[0].tolist() == flags[1].tolist()


def test_an_older_chat_under_settings_that_are_gone_opens_under_others(folder: Path) -> None:
    path = folder / f"{CHATS['tiny']['id']}.sqlite"
    gone = {"policy": "kvzip", "policy_options": {"layers": 4}, "recall": "attention"}
    with closing(sqlite3.connect(path)) as connection, connection:
        ((head,),) = connection.execute("SELECT fields FROM head")
        fields = json.loads(head)
        fields["profile"] |= {**gone, "recall_scope": "layer", "recall_from": "all"}
        connection.execute("UPDATE head SET fields = ?", (json.dumps(fields),))
        ((written,),) = connection.execute("SELECT value FROM about WHERE name = 'sums'")
        (values,) = connection.execute("SELECT * FROM head")
        sums = json.dumps({**json.loads(written), "head": record_sum(values)})
        connection.execute("UPDATE about SET value = ? WHERE name = 'sums'", (sums,))
    with SessionStore.open(path) as store:
        profile = saved_profile(store)
        resume_session(Session(tiny(), profile), store)
    assert (profile.policy, profile.policy_options, profile.recall) == ("salience", {}, "words")


@pytest.mark.parametrize("table", ["turns SET text = text || '.'", "rows SET data = zeroblob(60)"])
def test_damage_of_an_older_chat_is_found(folder: Path, table: str) -> None:
    path = folder / f"{CHATS['tiny']['id']}.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table}")
    before = path.read_bytes()
    with pytest.raises(DamagedSessionError):
        SessionStore.open(path)
    assert path.read_bytes() == before


def test_older_chats_are_listed_and_found_by_their_names_and_words(folder: Path) -> None:
    ids = {chat["id"] for chat in CHATS.values()}
    assert {entry.id for entry in list_sessions(folder).sessions} == ids
    assert find_session(folder, "anna's BOAT").stem == CHATS["tiny"]["id"]
    assert {hit.session.id for hit in search_sessions(folder, "boat apples").hits} == ids
    assert search_sessions(folder, "cafe").hits[0].session.id == CHATS["tiny"]["id"]


def test_text_that_is_deleted_stays_in_no_older_index(folder: Path) -> None:
    for chat in CHATS.values():
        remove_session(folder / f"{chat['id']}.sqlite")
    assert not any(b"breakfast" in file.read_bytes() for file in folder.iterdir())
