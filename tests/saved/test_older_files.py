"""Chats that were saved before go on as they did then.

`golden/saved-chats` has two chats with evictions, recall and pins. That of `tiny` has a name, a
summary and two system prompts, and its program was killed; that of `babbler` has keys and values.
The folder `turns` has a chat with reasoning, a turn left out, and sentences torn by `/erase`.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from chatting import answer, babbler, tiny
from sirchat.chat.session import Session
from sirchat.memory.ledger import Flag
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.search import search_sessions
from sirchat.saved.session_list import find_session, list_sessions, remove_session
from sirchat.saved.store import SessionStore

GOLDEN = Path(__file__).parents[1] / "golden" / "saved-chats"
CHATS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
MODELS = {"tiny": tiny, "babbler": babbler}


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
    before = path.stat().st_mtime_ns
    for _ in range(2):
        with SessionStore.open(path) as store:
            head = store.state_record()
            assert head is not None
            assert (store.kv.load(head.fields["kv"]) is not None) == (model == "babbler")
            session = Session(MODELS[model](), saved_profile(store))
            resume_session(session, store)
        assert [[turn.role, turn.text] for turn in session.turns] == expected["turns"]
        rows, flags = session.engine.save().rows, session.ledger.column("flags")
        assert session.seen == expected["seen"]
        assert session.engine.save().held.tolist() == expected["held"]
        assert session.ledger.pinned_positions.tolist() == expected["pinned"]
        assert np.flatnonzero(flags & Flag.EXCLUDED).tolist() == expected["excluded"]
        assert {name: crc32(rows[name].tobytes()) for name in expected["rows"]} == expected["rows"]
    assert path.stat().st_mtime_ns == before  # a chat that is only looked at is no newer
    assert answer(list(session.ask("Where does Anna live now?"))) == expected["next"]
    assert session.engine.save().held.tolist() == expected["held_after"]


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


def test_older_chats_are_found_by_their_names_and_words_and_removed_with_all_text(
    folder: Path,
) -> None:
    ids = {chat["id"] for chat in CHATS.values()}
    assert {entry.id for entry in list_sessions(folder).sessions} == ids
    assert find_session(folder, "anna's BOAT").stem == CHATS["tiny"]["id"]
    assert {hit.session.id for hit in search_sessions(folder, "boat apples").hits} == ids
    assert search_sessions(folder, "cafe").hits[0].session.id == CHATS["tiny"]["id"]
    for ident in ids:
        remove_session(folder / f"{ident}.sqlite")
    assert not any(b"breakfast" in file.read_bytes() for file in folder.iterdir() if file.is_file())


def test_an_older_file_tells_reasoning_and_flags_of_its_turns(folder: Path) -> None:
    path = folder / "turns" / "chat.sqlite"
    listed = list_sessions(path.parent).sessions[0]
    assert (listed.first_message, listed.turns) == ("My name is Anna.", 4)
    (hit,) = search_sessions(path.parent, "think").hits
    line = "".join(part.text for part in hit.snippet)
    assert "She says </think> and think\\> and <think>. Nice to meet you" in line
    with SessionStore.read(path) as store:
        turns = store.turns()
    assert turns[1].thinking == "She says </think> and think\\> and <think>."
    assert turns[1].text == "Nice to meet you, Anna."
    assert [turn.is_left_out for turn in turns] == [False, False, False, True]
    assert turns[2].torn == ("The code of the door is .",)
    assert [turn.is_summary for turn in turns] == [False] * 4
