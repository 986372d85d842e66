"""Recall through a search index: in the engine, in a chat, in settings and in the benchmark."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cache_contents import contents, same
from chatting import answer, session
from command import run
from import_graph import SOURCES, imports
from recall_rounds import find, memory, say, some_ids, talked
from sirchat.chat.events import Recalled
from sirchat.chat.settings import build_cache_settings
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed
from sirchat.errors import SettingError
from sirchat.memory import archive_search
from sirchat.memory.archive_search import wants_index
from sirchat.memory.index import AUTO_INDEX_ROWS
from sirchat.memory.retrieval import RecallSettings

pytest.importorskip("faiss")

RETRIEVERS: list[str] = ["attention", "mips", "cosine", "cosine-pairwise"]


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small sample beside the proposed rows, so that the result depends on the proposed ones."""
    monkeypatch.setattr(archive_search, "SAMPLE", 500)
    monkeypatch.setattr(archive_search, "LOWEST_OF", (500, 500))


@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_a_search_by_index_changes_nothing(retriever: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_search, "SAMPLE", 5)
    engine, model = talked(memory("entropy", retriever=retriever, index="on"))
    engine.residency.clear_reserve()
    before, rows = contents(engine), engine.ledger.rows()
    found = find(engine, model, some_ids(50, 60), 50)
    assert found is not None
    assert engine.store.archive.index is not None
    assert same(contents(engine), before)
    now = engine.ledger.rows()
    for column in ("token_id", "state", "flags", "surprisal"):
        np.testing.assert_array_equal(now[column], rows[column])


def test_rows_held_again_or_undone_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_search, "SAMPLE", 1)
    engine, model = talked(memory("sink", retriever="attention", index="on"))
    for turn in range(20, 24):
        checkpoint = engine.checkpoint()
        found = say(engine, model, turn, count=40)
        assert found is not None
        assert found.positions.max() < checkpoint.cache.seen
        engine.undo(checkpoint)
        say(engine, model, turn + 50, count=30)
        again = find(engine, model, some_ids(turn, 10), turn)
        mine = engine.residency.budget
        engine.residency.budget = replace(mine, settings=memory("sink", retriever="attention"))
        exact = find(engine, model, some_ids(turn, 10), turn)
        engine.residency.budget = mine
        assert again is not None
        assert exact is not None
        assert set(again.positions) <= set(exact.positions)


def test_switching_the_index_off_removes_it() -> None:
    engine, model = talked(memory("sink", index="on"))
    assert engine.store.archive.index is not None
    recall = engine.settings.recall
    assert recall is not None
    list(engine.residency.switch(replace(engine.settings, recall=replace(recall, index="off"))))
    assert engine.store.archive.index is None
    say(engine, model, 30)
    assert engine.store.archive.index is None


def test_auto_uses_an_index_above_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = RecallSettings("attention", index="auto")
    assert wants_index(auto, AUTO_INDEX_ROWS + 1)
    assert not wants_index(auto, AUTO_INDEX_ROWS)
    assert not wants_index(replace(auto, scope="layer"), AUTO_INDEX_ROWS + 1)
    assert not wants_index(replace(auto, index="off"), AUTO_INDEX_ROWS + 1)
    assert wants_index(replace(auto, index="on"), 1)
    monkeypatch.setattr(archive_search, "is_available", lambda: False)
    assert not wants_index(auto, AUTO_INDEX_ROWS + 1)


def test_tiny_answers_from_rows_that_an_index_found() -> None:
    chat = session(policy="sink", budget=96, seed=1)
    for text in ("My name is Anna.", "I live in Lisbon."):
        list(chat.ask(text))
    for number in range(12):
        list(chat.ask(("What is the opposite of hot?", "Tell me a joke.")[number % 2]))
    settings = {"recall": "attention", "budget": 160, "recall_n": 64, "recall_index": "on"}
    list(chat.switch("/recall", **settings))
    events = list(chat.ask("Where do I live?"))
    assert answer(events) == "You live in Lisbon."
    (recalled,) = [one for one in events if isinstance(one, Recalled)]
    assert len(recalled.positions) == 64
    list(chat.undo())
    assert answer(list(chat.ask("Where do I live?"))) == "You live in Lisbon."
    list(chat.erase("Lisbon"))
    assert "Lisbon" not in answer(list(chat.ask("Where do I live?")))


def test_the_index_setting_reaches_the_recall_settings() -> None:
    profile = changed(Profile(), "/set", recall="mips", recall_index="on")
    recall = build_cache_settings(profile).recall
    assert recall is not None
    assert recall.index == "on"


def test_without_faiss_an_index_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirchat.chat.settings.is_available", lambda: False)
    session(recall="mips")
    with pytest.raises(SettingError, match=r"pip install 'sirchat\[faiss\]'") as error:
        session(recall="mips", recall_index="on")
    assert "\n" not in str(error.value)


def test_an_index_with_scope_layer_is_refused() -> None:
    with pytest.raises(SettingError, match="requires recall_scope=token"):
        changed(Profile(), "/set", recall="mips", recall_index="on", recall_scope="layer")


def test_faiss_is_loaded_only_where_it_is_used() -> None:
    users = {name for name, source in SOURCES.items() if "faiss" in imports(source)}
    assert users == {"sirchat.memory.index"}
    assert not any("faiss" in imports(SOURCES[name], at_load=True) for name in users)


@pytest.mark.slow
def test_bench_reports_speed_recall_and_size() -> None:
    done = run("bench", "index", "--archived", "10000", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert len(results) == 4
    assert all("recall@200 " in one["note"] and " MiB" in one["note"] for one in results)
    assert "10,000 rows: " in results[0]["note"]
    assert {one["unit"] for one in results} == {"search"}
