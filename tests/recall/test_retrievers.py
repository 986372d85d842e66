"""Retrievers: found by name, and the scores of whole turns against the definition written out.

The scores by keys, values and queries are compared with the paper's equations in
`engine/test_recall_engine.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chatting import babbler, session
from families import loaded
from recall_rounds import as_if_at_zero
from sirchat.chat.events import Recalled
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import allowed_in_words
from sirchat.errors import SettingError
from sirchat.lab.studies.retrieval import Retrieval, cells
from sirchat.memory.archive import Archive
from sirchat.memory.cache import LayerRotation
from sirchat.memory.key_values import KeyValues
from sirchat.memory.ledger import Ledger, Role
from sirchat.memory.registry import BEST_RETRIEVER, RETRIEVERS
from sirchat.recall import candidates, retrievers
from sirchat.recall.candidates import Candidates, Query
from sirchat.recall.recall import choose, softened, weighted
from sirchat.recall.retrievers import retriever

NO_ROTATION = LayerRotation(None)
TURNS = [0, 0, 0, 2, 2, 3, 3, 3, 3, 6, 6, 7]
POSITIONS = [1, 2, 5, 9, 10, 14, 15, 17, 18, 30, 31, 44]
WORDS = [0.0, 3.0, 1.0, 0.5, 0.0, 0.0, 2.0, 0.0]


def rows(positions: list[int], seed: int) -> KeyValues:
    """Rows of two layers with two heads of 16 dimensions each."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, len(positions), 16, generator=generator) for _ in range(4)]
    return KeyValues(np.array(positions), np.array(positions) % 11, tensors)


class Talk(Ledger):
    """A ledger that knows the turn and the role of these tokens alone."""

    def __init__(self, positions: list[int], turns: list[int], templates: list[int]) -> None:
        super().__init__()
        self._columns = {"turn": np.zeros(100, np.int64), "role": np.full(100, Role.USER)}
        self._columns["turn"][positions] = turns
        self._columns["role"][templates] = Role.TEMPLATE

    def column(self, name: str) -> NDArray[Any]:
        return self._columns[name]


def found(
    name: str,
    given: KeyValues,
    query: Query,
    rotation: LayerRotation = NO_ROTATION,
    turns: list[int] = TURNS,
    templates: tuple[int, ...] = (),
) -> list[float]:
    """The scores of these rows by a retriever, of whose layers the second one counts."""
    archive = Archive()
    archive.add(given)
    ledger = Talk(given.positions.tolist(), turns, list(templates))
    candidates = Candidates(archive, given.positions, query, [NO_ROTATION, rotation], ledger)
    scores = retriever(name).score(candidates)
    assert scores.shape == (1, len(given))
    return scores[0].tolist()


def asked(words: list[float] = WORDS, count: int = 3) -> Query:
    return Query(rows(list(range(60, 60 + count)), 2), words=np.array(words))


def cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.hypot(*one) / math.hypot(*other)


def shared(scores: list[float]) -> list[float]:
    padded = [0.0, *scores, 0.0]
    return [padded[n] / 2 + padded[n + 1] + padded[n + 2] / 2 for n in range(len(scores))]


def standard(scores: list[float], among: list[int]) -> list[float]:
    some = [scores[n] for n in among]
    return [(one - fmean(some)) / pstdev(some) for one in scores]


def by_both(given: KeyValues, asked: KeyValues, rotation: LayerRotation) -> list[float]:
    """The definition of `hybrid` with loops: one score for each archived row."""
    theirs = as_if_at_zero(given, 2, rotation.key).tolist()
    ours = as_if_at_zero(asked, 2, rotation.key).tolist()
    among = sorted(set(TURNS))
    keys = [0.0] * len(WORDS)
    for j in range(len(asked)):
        nearest = [
            max(
                fmean(cosine(ours[head][j], theirs[head][i]) for head in range(2))
                for i in range(len(given))
                if TURNS[i] == turn
            )
            for turn in among
        ]
        for turn, one in zip(among, standard(nearest, list(range(len(among)))), strict=True):
            keys[turn] += one
    words, keys = standard(WORDS, among), standard(shared(keys), among)
    return [words[turn] + 0.4 * keys[turn] for turn in TURNS]


def test_by_words_each_token_has_the_score_of_its_turn() -> None:
    assert found("bm25", rows(POSITIONS, 1), asked()) == [WORDS[turn] for turn in TURNS]


def test_tokens_of_the_chat_template_come_after_all_others() -> None:
    scores = found("bm25", rows(POSITIONS, 1), asked(), templates=(5, 14))
    expected = [WORDS[turn] for turn in TURNS]
    expected[2] = expected[5] = min(expected) - 1
    assert scores == expected


@pytest.mark.parametrize("batch", [1, 4, 5, 100])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_keys_of_a_turn_count_by_the_nearest_of_each(
    batch: int, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a turn is read in several batches."""
    monkeypatch.setattr(candidates, "_BATCH", batch)
    rotation = loaded("llama").rotations[1] if rotated else NO_ROTATION
    given, query = rows(POSITIONS, 1), asked()
    expected = by_both(given, query.key_values, rotation)
    scores = found("hybrid", given, query, rotation)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_keys_of_the_chat_template_are_not_searched_for() -> None:
    given, query = rows(POSITIONS, 1), asked(count=5)
    said = replace(query, of_template=np.array([True, False, False, False, True]))
    inner = query.key_values.take(np.array([1, 2, 3]))
    expected = by_both(given, inner, NO_ROTATION)
    np.testing.assert_allclose(found("hybrid", given, said), expected, rtol=1e-4, atol=1e-5)


def test_without_keys_to_search_for_words_alone_count() -> None:
    given = rows(POSITIONS, 1)
    assert found("hybrid", given, asked(count=0)) == found("bm25", given, asked())


def test_where_all_turns_are_alike_neither_part_counts() -> None:
    query = Query(rows([60], 2), words=np.zeros(2))
    assert found("hybrid", rows([3, 4], 1), query, turns=[1, 1]) == [0.0, 0.0]


def test_our_retrievers_are_found_by_the_names_of_their_files() -> None:
    assert RETRIEVERS.names() == [
        *("attention", "bm25", "cosine", "cosine-pairwise", "hybrid", "mips", "random", "words")
    ]
    assert BEST_RETRIEVER in RETRIEVERS.names()
    for name in RETRIEVERS.names():
        assert retriever(name).__doc__


def test_an_unknown_retriever_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"retriever 'cosin' is unknown.*did you mean cosine"):
        retriever("cosin")


NEWEST = """
from sirchat.recall.retrievers.base import Retriever


class MyNewest(Retriever):
    \"\"\"The newest tokens.\"\"\"

    takes_weight = False
    needs_queries = True

    def score(self, candidates):
        import torch

        return torch.from_numpy(candidates.positions).double()[None]
"""


@pytest.fixture
def my_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A retriever that is one file more in the package."""
    (tmp_path / "my_newest.py").write_text(NEWEST)
    monkeypatch.setattr(retrievers, "__path__", [*retrievers.__path__, str(tmp_path)])
    yield "my-newest"
    sys.modules.pop("sirchat.recall.retrievers.my_newest", None)


def test_a_retriever_is_one_file_more(my_newest: str) -> None:
    """Settings, their checks and their help, a chat and the studies know it by its file alone."""
    assert my_newest in allowed_in_words("recall")
    with pytest.raises(SettingError, match="recall my-newest requires recall_query=turn"):
        changed_profile(Profile(), "/set", recall=my_newest, recall_query="recent")
    rows = {cell.row for cell in cells(Retrieval(Profile(), retrievers=(my_newest,)))}
    assert f"{my_newest}, span 2" in rows
    assert not any("surprisal" in row for row in rows)

    chat = session(babbler(), policy="sink", budget=128, recall=my_newest, recall_n=20)
    for text in ["What a rainy day it is.", "Tell me a joke."] * 6:
        came = [event for event in chat.read_user(text) if isinstance(event, Recalled)]
        list(chat.read_reply("Fine, thank you."))
    (last,) = came
    assert last.retriever == my_newest
    assert last.scores == tuple(map(float, last.positions))
    assert last.positions == tuple(range(last.positions[0], last.positions[-1] + 1))


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40),
    n=st.integers(1, 45),
    span=st.integers(0, 3),
    data=st.data(),
)
def test_choice_takes_the_best_with_their_neighbours(
    scores: list[float], n: int, span: int, data: st.DataObject
) -> None:
    some = st.sets(st.integers(0, 80), min_size=len(scores), max_size=len(scores))
    positions = sorted(data.draw(some))
    got = choose(torch.tensor(scores), np.array(positions), n, span).tolist()
    chosen: list[int] = []
    for _, hit in sorted(zip(scores, positions, strict=True), key=lambda one: (-one[0], -one[1])):
        for near in [hit, *(hit + side * d for d in range(1, span + 1) for side in (-1, 1))]:
            if near in positions and near not in chosen and len(chosen) < n:
                chosen.append(near)
    assert got == sorted(chosen)


def test_a_soft_score_is_the_root_shared_with_its_neighbours() -> None:
    rng = np.random.default_rng(5)
    positions = np.array([3, 4, 5, 9, 10, 20, 22, 23])
    scores = torch.from_numpy(rng.normal(size=(2, 8)))
    for layer, found in zip(scores.tolist(), softened(scores, positions).tolist(), strict=True):
        root = {at: (one - min(layer)) ** 0.5 for at, one in zip(positions, layer, strict=True)}
        plain = [root[p] / 2 + (root.get(p - 1, 0) + root.get(p + 1, 0)) / 4 for p in positions]
        assert found == pytest.approx(plain)


def test_surprisal_multiplies_the_score_above_the_lowest() -> None:
    scores = torch.tensor([[-3.0, -1.0, 0.0]])
    assert weighted(scores, np.array([2.0, 1.0, 0.5])).tolist() == [[0.0, 2.0, 1.5]]
