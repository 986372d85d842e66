"""Chats of an older sirchat open and go on as they did there.

`golden/saved-chats` was written by version 0.1.0 in November 2026: two chats with evictions, recall
and pins, and the search index. That of `tiny` has a name and a summary, that of `babbler` has keys
and values.
"""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from chatting import answer, babbler, tiny
from sirchat.chat.rereading import read_whole
from sirchat.chat.session import Session
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
    with SessionStore.open(folder / f"{expected['id']}.sqlite") as store:
        head = store.head()
        assert head is not None
        assert (store.kv.load(head.fields["kv"]) is not None) == (model == "babbler")
        session = Session(MODELS[model](), saved_profile(store))
        resume_session(session, store)
    assert [[turn.role, turn.text] for turn in session.turns] == expected["turns"]
    assert session.seen == expected["seen"]
    rows, recalled = session.snapshot().rows, head.fields["recalled"]
    assert [row.position for row in rows] == [at for at in expected["held"] if at not in recalled]
    assert [row.position for row in rows if "pinned" in row.flags] == expected["pinned"]
    # Recall was not as it is now: the next reply is version 0.1.0's without it, once the policy had
    # chosen anew from all rows.
    budget = session.budget
    session.switch("/set", recall="off", budget=400)
    session.switch("/set", budget=budget)
    assert answer(list(session.ask("Where does Anna live now?"))) == expected["next"]
    held = {row.position for row in session.snapshot().rows}
    assert set(expected["pinned"]) <= held <= set(expected["held_after"])
    assert len(expected["held_after"]) - len(held) < 8, "but for a part of what a reply evicts"


def test_an_older_chat_has_no_times_and_new_messages_get_theirs(folder: Path) -> None:
    chat, before = CHATS["tiny"], time.time()
    with SessionStore.open(folder / f"{chat['id']}.sqlite") as store:
        session = Session(tiny(), saved_profile(store))
        resume_session(session, store)
        assert {turn.time for turn in session.turns} == {None}
        autosave, old = Autosave(session, store), len(session.turns)
        list(session.read_user("Where does Anna live now?"))
        autosave.update()
    with SessionStore.open(folder / f"{chat['id']}.sqlite") as store:
        times = [turn.time for turn in store.turns()]
    assert times[:old] == [None] * old
    assert len(times) == old + 1
    assert before - 1 <= (times[old] or 0) <= time.time()
    assert [turn.time for turn in read_whole(session).turns] == times


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
