"""Recall: the choice of archived rows by their scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sirchat.recall.recall import choose, softened, weighted


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
