"""Recall of whole turns in the engine: only archived rows, at most n, and no trace of a search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from held_rows import contents, same
from recall_rounds import memory, some_ids, talked
from session_files import columns
from sirchat.engine.engine import Engine
from sirchat.engine.types import TurnRef
from sirchat.memory.ledger import Role, State
from sirchat.models.model import LoadedModel
from sirchat.recall.recall import SearchResult, restore, search, tokens_of_best_turns
from sirchat.recall.retrievers.base import with_neighbours

RETRIEVERS: list[str] = ["bm25", "hybrid"]
ROUNDS = 8


def find(
    engine: Engine, model: LoadedModel, words: list[float], ids: list[int] | None = None
) -> SearchResult | None:
    ids = ids or some_ids(50, 12)
    turn, roles = TurnRef(ROUNDS, ROUNDS), [Role.USER] * len(ids)
    return search(engine, model, ids, roles, turn, with_neighbours(np.array([*words, 0.0])))


def listened(policy: str, retriever: str, family: str = "llama") -> tuple[Engine, LoadedModel]:
    """An engine that has evicted most of its turns, without recall until then."""
    engine, model = talked(memory(policy, retriever="mips"), rounds=ROUNDS, family=family)
    engine.residency.switch(memory(policy, retriever=retriever))
    return engine, model


@pytest.mark.parametrize("family", ["llama", "deepseek-mla", "falcon"])
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_the_turn_with_the_words_comes_back_whole(retriever: str, family: str) -> None:
    """Under `hybrid` too, on models whose queries can't be recorded: it compares keys."""
    engine, model = listened("sink", retriever, family)
    found = find(engine, model, [0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert found is not None
    restore(engine, found, 12)
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
    assert columns(engine.ledger.rows()) == columns(rows)
    again = find(engine, model, words, some_ids(60, count))
    assert again is not None
    assert found.scores.tolist() == again.scores.tolist()
    if retriever == "bm25":
        assert set(found.positions) <= set(archived)
    turns = rows["turn"][found.positions]
    for turn in np.unique(turns):
        assert len(set(found.scores[turns == turn].tolist())) == 1
    restore(engine, found, count)
    assert engine.residency.recalled_count <= engine.residency.recall_room(count)
    assert engine.resident <= engine.budget
    assert np.isin(engine.ledger.recalled, found.positions).all()


def found_turns(engine: Engine, words: list[float], *, is_auto: bool = True) -> set[int]:
    """The turns that a search finds; turns 0 to 4 are archived, and those without words get 0."""
    scores = with_neighbours(np.array(words + [0.0] * (ROUNDS + 1 - len(words))))
    found = tokens_of_best_turns(engine, scores, 30, is_auto=is_auto)
    return set() if found is None else set(engine.ledger.column("turn")[found.positions].tolist())


def test_by_itself_recall_leaves_out_turns_that_fit_much_less_well_or_not_at_all() -> None:
    engine, _ = listened("sink", "bm25")
    assert found_turns(engine, [0.0], is_auto=False)
    words = [35.0, 0.0, 0.0, 0.0, 60.0]  # turns beside these get half of their scores
    assert found_turns(engine, words, is_auto=False) > {0, 4}  # as many as are needed for 30 tokens
    assert not found_turns(engine, [0.0])
    assert found_turns(engine, words) == {4}  # 35 is less than 0.6 of 60
    assert found_turns(engine, [37.0, *words[1:]]) == {0, 4}
    close = [60.0, 36.0]  # 78, 66
    assert found_turns(engine, close) == {0, 1}  # beside the best, and fits nearly as well


def test_by_itself_recall_finds_a_correction_that_fits_less_well_than_what_it_corrects() -> None:
    engine, _ = listened("sink", "bm25")
    assert found_turns(engine, [60.0, 0.0, 0.0, 0.0, 31.0]) == {0, 4}
    assert found_turns(engine, [60.0, 0.0, 0.0, 0.0, 29.0]) == {0}
    beside_a_better_one = [90.0, 0.0, 0.0, 31.0, 40.0]  # turns 3 and 4 get 51 and 55.5
    assert found_turns(engine, beside_a_better_one) == {0, 4}


def test_by_words_nothing_is_read() -> None:
    engine, model = listened("sink", "bm25")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "prefill", None)
        assert find(engine, model, [1.0] * ROUNDS) is not None


@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_a_search_by_words_needs_the_words(retriever: str) -> None:
    engine, model = listened("sink", retriever)
    with pytest.raises(ValueError, match="a score for each turn"):
        search(engine, model, some_ids(50, 5), [Role.USER] * 5, TurnRef(ROUNDS, ROUNDS))
