"""Retrievers: found by name, and the scores of whole turns against the definition written out.

The scores by keys, values and queries are compared with the paper's equations in
`engine/test_recall_engine.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatting import babbler, session
from sirchat.chat.events import Recalled
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import allowed_values
from sirchat.errors import SettingError
from sirchat.lab.studies.retrieval import Retrieval, cells
from sirchat.memory.registry import BEST_RETRIEVER, RETRIEVERS
from sirchat.recall import retrievers
from sirchat.recall.recall import SearchResult, best_tokens, weighted
from sirchat.recall.retrievers import retriever


def test_our_retrievers_are_found_by_the_names_of_their_files_and_no_others() -> None:
    assert RETRIEVERS.names() == [*("cosine", "cosine-pairwise", "meaning", "mips", "words")]
    assert BEST_RETRIEVER in RETRIEVERS.names()
    for name in RETRIEVERS.names():
        assert retriever(name).__doc__
    with pytest.raises(SettingError, match=r"retriever 'cosin' is unknown.*did you mean cosine"):
        retriever("cosin")


NEWEST = """
from sirchat.recall.retrievers.base import Retriever


class MyNewest(Retriever):
    \"\"\"The newest tokens.\"\"\"

    takes_weight = False

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
    assert my_newest in allowed_values("recall")
    assert changed_profile(Profile(), "/set", recall=my_newest).recall == my_newest
    rows = {cell.row for cell in cells(Retrieval(Profile(), retrievers=(my_newest,)))}
    assert my_newest in rows
    assert not any("surprisal" in row for row in rows)

    chat = session(babbler(), policy="sink", budget=128, recall=my_newest, recall_n=20)
    for text in ["What a rainy day it is.", "Tell me a joke."] * 6:
        came = [event for event in chat.read_user(text) if isinstance(event, Recalled)]
        list(chat.read_reply("Fine, thank you."))
    (last,) = came
    assert last.retriever == my_newest
    assert last.scores == tuple(map(float, last.positions))
    assert last.positions == tuple(range(last.positions[0], last.positions[-1] + 1))


@given(
    scores=st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40),
    n=st.integers(1, 45),
    data=st.data(),
)
def test_choice_takes_the_best(scores: list[float], n: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, 80), min_size=len(scores), max_size=len(scores))
    positions = sorted(data.draw(some))
    found = SearchResult(np.array(positions), np.array(scores))
    got = best_tokens(found, n, np.zeros(0, np.int64)).positions.tolist()
    best = sorted(zip(scores, positions, strict=True), reverse=True)[:n]
    assert got == sorted(position for _, position in best)


def test_surprisal_multiplies_the_score_above_the_lowest() -> None:
    scores = torch.tensor([[-3.0, -1.0, 0.0]])
    assert weighted(scores, np.array([2.0, 1.0, 0.5])).tolist() == [[0.0, 2.0, 1.5]]
