"""Recall of whole turns in the engine: only archived rows, at most n, and no trace of a search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_contents import contents, same
from recall_rounds import memory, some_ids, talked
from sirchat.engine.engine import Engine
from sirchat.engine.records import SearchResult, TurnRef
from sirchat.engine.search import search
from sirchat.memory.ledger import Role, State
from sirchat.models.model import LoadedModel

RETRIEVERS: list[str] = ["bm25", "hybrid"]
ROUNDS = 8


def find(
    engine: Engine, model: LoadedModel, words: list[float], ids: list[int] | None = None
) -> SearchResult | None:
    ids = ids or some_ids(50, 12)
    turn, roles = TurnRef(ROUNDS, ROUNDS), [Role.USER] * len(ids)
    return search(engine, model, ids, roles, turn, np.array([*words, 0.0]))


def listened(policy: str, retriever: str, family: str = "llama") -> tuple[Engine, LoadedModel]:
    """An engine that has evicted most of its turns, without recall until then."""
    engine, model = talked(memory(policy, retriever="mips"), rounds=ROUNDS, family=family)
    engine.contents.switch(memory(policy, retriever=retriever))
    engine.contents.clear_reserve()
    return engine, model


@pytest.mark.parametrize("family", ["llama", "deepseek-mla", "falcon"])
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_the_turn_with_the_words_comes_back_whole(retriever: str, family: str) -> None:
    """Under `hybrid` too, on models whose queries can't be recorded: it compares keys."""
    engine, model = listened("sink", retriever, family)
    found = find(engine, model, [0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert found is not None
    engine.contents.fill_reserve(found)
    recalled = engine.ledger.recalled
    assert len(recalled) == 30
    turns = engine.ledger.column("turn")
    assert set(np.flatnonzero(turns == 2)) <= set(recalled)
    assert {1, 3} >= set(turns[recalled]) - {2}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(["sink", "entropy", "reservoir"]),
    retriever=st.sampled_from(RETRIEVERS),
    words=st.lists(st.floats(0, 30), min_size=ROUNDS, max_size=ROUNDS),
    count=st.integers(1, 40),
)
def test_a_search_finds_what_is_archived_and_leaves_no_trace(
    policy: str, retriever: str, words: list[float], count: int
) -> None:
    engine, model = listened(policy, retriever)
    before, rows = contents(engine), engine.ledger.rows()
    archived = np.flatnonzero(rows["state"] == State.ARCHIVED)
    found = find(engine, model, words, some_ids(60, count))
    assert found is not None
    assert same(contents(engine), before)
    for column in ("token_id", "state", "flags", "surprisal", "birth_decay"):
        np.testing.assert_array_equal(engine.ledger.rows()[column], rows[column])
    again = find(engine, model, words, some_ids(60, count))
    assert again is not None
    assert found.scores.tolist() == again.scores.tolist()
    if retriever == "bm25":
        assert set(found.positions) <= set(archived)
    turns = rows["turn"][found.positions]
    for turn in np.unique(turns):
        assert len(set(found.scores[turns == turn].tolist())) == 1
    engine.contents.fill_reserve(found)
    assert engine.contents.recalled <= engine.contents.budget.reserve
    assert engine.resident <= engine.budget
    assert np.isin(engine.ledger.recalled, found.positions).all()


def test_by_itself_recall_leaves_out_turns_that_fit_much_less_well() -> None:
    engine, model = listened("sink", "bm25")
    turns = engine.ledger.column("turn")
    words = [0.0, 60.0, 0.0, 0.0, 40.0, 0.0, 0.0, 34.0]  # turns 0, 2, 3, 5 and 6 get half of these
    close = [60.0, 36.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # 78, 66, 18

    def found_turns(words: list[float]) -> set[int]:
        found = find(engine, model, words)
        assert found is not None
        return set(turns[found.positions].tolist())

    assert found_turns(words) > {1, 4}  # as many as are needed for 30 tokens
    engine.contents.switch(memory("sink", budget=200, retriever="bm25", n=None))
    assert found_turns(words) == {1, 4}  # 34 is less than 0.6 of 60
    assert found_turns(close) == {0, 1}  # a turn beside the best one that fits nearly as well


def test_by_words_nothing_is_read() -> None:
    engine, model = listened("sink", "bm25")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "feed", None)
        assert find(engine, model, [1.0] * ROUNDS) is not None


@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_a_search_by_words_needs_the_words(retriever: str) -> None:
    engine, model = listened("sink", retriever)
    with pytest.raises(ValueError, match="a score for each turn"):
        search(engine, model, some_ids(50, 5), [Role.USER] * 5, TurnRef(ROUNDS, ROUNDS))
