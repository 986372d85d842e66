"""What left the cache: stored once, found by its position, let go of when there is too much."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sirchat.memory.archive import SEGMENT_ROWS, Archive, Rows

SHAPES = ((2, 4), (2, 4), (1, 3), (1, 5))  # heads and dimensions of two layers' keys and values


def rows(positions: list[int]) -> Rows:
    """Rows whose every number is their position."""
    at = np.array(positions, np.int64)
    column = torch.from_numpy(at).float()[None, :, None]
    return Rows(at, at % 7, [column.expand(h, len(at), d).contiguous() for h, d in SHAPES])


def check_fetched(archive: Archive, positions: list[int]) -> None:
    found = archive.fetch(np.array(positions, np.int64))
    assert found.positions.tolist() == positions
    assert found.written_at.tolist() == [position % 7 for position in positions]
    for tensor, (heads, dims) in zip(found.tensors, SHAPES, strict=True):
        assert tensor.shape == (heads, len(positions), dims)
        assert (tensor == torch.tensor(positions, dtype=torch.float)[None, :, None]).all()


sets = st.sets(st.integers(0, 3000), min_size=1, max_size=60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), sets),
        st.tuples(st.just("remove"), sets),
        st.tuples(st.just("truncate"), st.integers(0, 3000)),
    ),
    max_size=12,
)


@given(steps)
@settings(max_examples=60)
def test_it_stores_what_was_added_and_not_taken_away(
    plan: list[tuple[str, set[int] | int]],
) -> None:
    archive, expected = Archive(), set[int]()
    for step, what in plan:
        if isinstance(what, int):
            archive.truncate(what)
            expected = {one for one in expected if one < what}
        elif step == "add":
            archive.add(rows(sorted(what)))
            expected |= what
        else:
            archive.remove(np.array(sorted(what), np.int64))
            expected -= what
        everything = np.arange(4000)
        assert everything[archive.has(everything)].tolist() == sorted(expected)
        assert len(archive) == len(expected)
        if expected:
            check_fetched(archive, sorted(expected, key=lambda one: -one % 11))


def test_a_row_is_stored_once() -> None:
    archive = Archive()
    for _ in range(5):
        archive.add(rows(list(range(SEGMENT_ROWS))))
    once = archive.nbytes
    archive.add(rows([SEGMENT_ROWS]))
    assert archive.nbytes == 2 * once


def test_over_the_limit_the_segments_of_the_lowest_scores_go() -> None:
    archive = Archive()
    archive.add(rows(list(range(4 * SEGMENT_ROWS))))
    archive.limit = archive.nbytes // 2
    means = {0: 3.0, 1: 1.0, 2: 2.0, 3: 4.0}  # by segment
    gone = archive.shrink(lambda at: np.array([means[p // SEGMENT_ROWS] for p in at.tolist()]))
    lost = [p for p in range(4 * SEGMENT_ROWS) if p // SEGMENT_ROWS in (1, 2)]
    assert sorted(gone.tolist()) == lost
    assert archive.nbytes <= archive.limit
    assert not archive.has(np.array(lost)).any()
    kept = [0, SEGMENT_ROWS - 1, 3 * SEGMENT_ROWS, 4 * SEGMENT_ROWS - 1]
    check_fetched(archive, kept)
    archive.add(rows(lost[:3]))
    check_fetched(archive, [*lost[:3], *kept])


def test_what_is_not_stored_is_not_invented() -> None:
    archive = Archive()
    archive.add(rows([1, 2]))
    with pytest.raises(LookupError):
        archive.fetch(np.array([1, 3]))
    with pytest.raises(LookupError):
        archive.fetch(np.array([10**6]))


def test_a_removed_row_leaves_no_numbers_behind() -> None:
    archive = Archive()
    archive.add(rows([5, 6, 7]))
    archive.remove(np.array([6]))
    segments = [one for one in archive._segments if one is not None]
    assert not any((one[:, 1] != 0).any() for one in segments[0].tensors)
    assert segments[0].positions[:3].tolist() == [5, -1, 7]
