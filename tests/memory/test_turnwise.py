"""Scores of whole turns, by words and by keys, against the definition written out."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch
from torch import Tensor

from families import loaded
from sirchat.memory import ranking as turnwise
from sirchat.memory.archive import Archive
from sirchat.memory.cache import LayerRotation
from sirchat.memory.ranking import ArchivedTurns
from sirchat.memory.rope import Rotation
from sirchat.memory.segments import Rows

NO_ROTATION = LayerRotation(None)
TURNS = [0, 0, 0, 2, 2, 3, 3, 3, 3, 6, 6, 7]
POSITIONS = [1, 2, 5, 9, 10, 14, 15, 17, 18, 30, 31, 44]
WORDS = [0.0, 3.0, 1.0, 0.5, 0.0, 0.0, 2.0, 0.0]


def rows(positions: list[int], seed: int) -> Rows:
    """Rows of two layers with two heads of 16 dimensions each."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, len(positions), 16, generator=generator) for _ in range(4)]
    return Rows(np.array(positions), np.array(positions) % 11, tensors)


def archived(given: Rows, turns: list[int] = TURNS) -> ArchivedTurns:
    archive = Archive()
    archive.add(given)
    return ArchivedTurns(archive, given.positions, np.array(turns))


def as_if_at_zero(rows: Rows, key: Tensor, rotation: Rotation | None) -> list[list[list[float]]]:
    """Keys [H][n][D], each rotated back from where it was written."""
    out = key
    if rotation is not None:
        one = [rotation.cos_sin(torch.tensor([at]), torch.tensor([0])) for at in rows.written_at]
        out = torch.cat(
            [rotation.apply(key[:, n : n + 1], *each) for n, each in enumerate(one)], dim=1
        )
    return out.tolist()


def cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.hypot(*one) / math.hypot(*other)


def shared(scores: list[float]) -> list[float]:
    padded = [0.0, *scores, 0.0]
    return [padded[n] / 2 + padded[n + 1] + padded[n + 2] / 2 for n in range(len(scores))]


def standard(scores: list[float], among: list[int]) -> list[float]:
    some = [scores[n] for n in among]
    return [(one - fmean(some)) / pstdev(some) for one in scores]


def by_both(given: Rows, asked: Rows, rotation: LayerRotation) -> list[float]:
    """The definition of `hybrid` with loops: one score for each archived row."""
    theirs = as_if_at_zero(given, given.tensors[2], rotation.key)
    ours = as_if_at_zero(asked, asked.tensors[2], rotation.key)
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
    words, keys = standard(shared(WORDS), among), standard(shared(keys), among)
    return [words[turn] + 0.4 * keys[turn] for turn in TURNS]


def test_by_words_a_turn_has_half_of_the_scores_beside_it() -> None:
    found = archived(rows(POSITIONS, 1)).by_words(np.array(WORDS))
    assert found.tolist() == [shared(WORDS)[turn] for turn in TURNS]


@pytest.mark.parametrize("batch", [1, 4, 5, 100])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_keys_of_a_turn_count_by_the_nearest_of_each(
    batch: int, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a turn is read in several batches."""
    monkeypatch.setattr(turnwise, "_BATCH", batch)
    rotation = loaded("llama").rotations[1] if rotated else NO_ROTATION
    given, asked = rows(POSITIONS, 1), rows([60, 61, 62], 2)
    one = Rows(asked.positions, asked.written_at, asked.tensors[2:])
    found = archived(given).by_both(np.array(WORDS), one, 1, rotation)
    np.testing.assert_allclose(found, by_both(given, asked, rotation), rtol=1e-4, atol=1e-5)


def test_where_all_turns_are_alike_neither_part_counts() -> None:
    given, asked = rows([3, 4], 1), rows([60], 2)
    one = Rows(asked.positions, asked.written_at, asked.tensors[2:])
    found = archived(given, [1, 1]).by_both(np.zeros(2), one, 1, NO_ROTATION)
    assert found.tolist() == [0.0, 0.0]
