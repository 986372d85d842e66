"""Statistics of keys and values against plain Python, for held and archived rows."""

from __future__ import annotations

import cmath
import math
from statistics import median_low
from typing import Any

import numpy as np
import pytest
import torch

from held_rows import append_rows
from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.ledger import KeyValueStat, Ledger
from sirchat.memory.placement import Placement
from sirchat.memory.rope import Rotation

LAYERS, HEADS, DIMS, ROWS = 3, 2, 6, 12
FREQUENCIES = [1.0, 0.3, 0.02]
WANTED: tuple[KeyValueStat, ...] = ("key_norm", "key_similarity", "value_norm")

Vectors = list[list[list[list[float]]]]  # by layer, head, row and dimension


def filled(dtype: torch.dtype = torch.float32) -> tuple[KeyValueStore, Vectors, Vectors]:
    """A store that has read `ROWS` rows, with their keys and values."""
    rotation = LayerRotation(Rotation(torch.tensor(FREQUENCIES)))
    cache, ledger = BoundedCache([rotation] * LAYERS, ROWS), Ledger()
    store = KeyValueStore(cache, ledger, limit=2**20)
    generator = torch.Generator().manual_seed(3)
    shape = (LAYERS, HEADS, ROWS, DIMS)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    for layer in range(LAYERS):
        cache.layers[layer].update(keys[layer][None], values[layer][None])
    cache.commit(ROWS)
    append_rows(ledger, [1.0] * ROWS)
    return store, keys.double().tolist(), values.double().tolist()


def moved(key: list[float], by: int) -> list[float]:
    """A key rotated to another position: halves are the parts of complex numbers."""
    half = len(key) // 2
    turned = [
        complex(key[at], key[half + at]) * cmath.exp(1j * by * FREQUENCIES[at])
        for at in range(half)
    ]
    return [one.real for one in turned] + [one.imag for one in turned]


def expected(name: str, keys: Vectors, values: Vectors, at: list[int]) -> list[float]:
    """The statistic of the rows at `at`, whose keys were written at these positions."""
    total = [0.0] * len(at)
    for layer in range(LAYERS):
        for head in range(HEADS):
            k = [keys[layer][head][p] for p in at]
            v = [values[layer][head][p] for p in at]
            of = of_head(name, k, v, at)
            total = [a + b for a, b in zip(total, of, strict=True)]
    return [one / (LAYERS * HEADS) for one in total]


def of_head(name: str, k: list[list[float]], v: list[list[float]], at: list[int]) -> list[float]:
    """The statistic in one head of rows with keys `k`, written at `at`, and values `v`."""
    if name == "key_norm":
        return [math.hypot(*one) for one in k]
    if name == "value_norm":
        return [sum(map(abs, one)) for one in v]
    return similarities(
        [moved(key, row - p) for row, (key, p) in enumerate(zip(k, at, strict=True))]
    )


def similarities(keys: list[list[float]]) -> list[float]:
    """Cosines with the mean of the keys over their lengths."""
    units = [[x / math.hypot(*key) for x in key] for key in keys]
    anchor = [sum(column) / len(units) for column in zip(*units, strict=True)]
    return [
        sum(a * b for a, b in zip(unit, anchor, strict=True)) / math.hypot(*anchor)
        for unit in units
    ]


def check(store: KeyValueStore, keys: Vectors, values: Vectors, at: list[int], rel: float) -> None:
    found: dict[Any, Any] = dict(store.statistics(np.array(at), WANTED))
    assert set(found) == set(WANTED)
    for name in WANTED:
        wanted = expected(name, keys, values, at)
        assert found[name].tolist() == pytest.approx(wanted, rel=rel, abs=rel), name


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_of_held_rows_they_are_those_of_what_attention_reads_and_archived_ones_count_as_held(
    dtype: torch.dtype, rel: float
) -> None:
    store, keys, values = filled(dtype)
    check(store, keys, values, list(range(ROWS)), rel)
    stays = [0, 2, 3, 7, 8, 11]
    store.place(Placement(np.array(stays)))
    for at in (stays, list(range(ROWS)), [1, 2, 4, 5, 11]):
        check(store, keys, values, at, rel)


def test_they_are_the_same_wherever_the_rows_are() -> None:
    store, _, _ = filled()
    at = np.arange(ROWS)
    store.place(Placement(np.array([0, 3, 5, 11])))
    before = store.statistics(at, WANTED)
    store.place(Placement(np.array([1, 2, 3, 4, 5, 6, 9])))
    after = store.statistics(at, WANTED)
    for name in WANTED:
        torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-6)


def test_a_row_that_is_gone_has_the_median() -> None:
    store, keys, values = filled()
    store.place(Placement(np.array([0, 2, 3])))
    store.erase(np.array([2, 5]))
    known = [p for p in range(ROWS) if p not in (2, 5)]
    found = store.statistics(np.arange(ROWS), ["value_norm"])["value_norm"]
    wanted = expected("value_norm", keys, values, known)
    assert found[known].tolist() == pytest.approx(wanted, rel=1e-5)
    assert found[[2, 5]].tolist() == pytest.approx([median_low(wanted)] * 2, rel=1e-5)
