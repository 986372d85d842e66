"""The search index finds the rows that an exhaustive search finds, and none that were removed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from sirchat.memory import archive_search
from sirchat.memory import index as index_module
from sirchat.memory.archive import Archive
from sirchat.memory.archive_search import ArchiveSearch, Ranked
from sirchat.memory.cache_layers import LayerRotation
from sirchat.memory.index import Index, IndexVectors
from sirchat.memory.recall import retriever as retriever_called
from sirchat.memory.retrieval import (
    Candidates,
    LayerQueries,
    Query,
    RecallSettings,
    Weight,
    softened,
    weighted,
)
from sirchat.memory.rope import Rotation
from sirchat.memory.segments import SEGMENT_ROWS, Positions, Rows

pytest.importorskip("faiss")

RETRIEVERS: list[str] = ["attention", "mips", "cosine", "cosine-pairwise"]
LAYERS, HEADS, DIMS = 3, 2, 16
ROPE = Rotation(10.0 ** -torch.arange(0.0, 4.0, 0.5))
ROTATION = LayerRotation(ROPE)
ROTATIONS = [ROTATION] * LAYERS


def some_rows(count: int, first: int = 0, seed: int = 0) -> Rows:
    """Rows in clusters, the same ones in every layer, first written at positions up to 900."""
    generator = torch.Generator().manual_seed(seed)
    written_at = torch.randint(0, 900, (count,), generator=generator)
    turn = ROPE.cos_sin(torch.zeros(count), written_at)
    of = torch.randint(0, 40, (count,), generator=generator)
    tensors = []
    for number in range(2 * LAYERS):
        clusters = torch.randn(HEADS, 40, DIMS, generator=torch.Generator().manual_seed(number))
        rows = clusters[:, of] + torch.randn(HEADS, count, DIMS, generator=generator)
        tensors.append(ROPE.apply(rows, *turn) if number % 2 == 0 else rows)
    return Rows(np.arange(first, first + count), written_at.numpy(), tensors)


def some_query(seed: int = 1, tokens: int = 5) -> Query:
    generator = torch.Generator().manual_seed(seed)
    asked = [2 * torch.randn(2 * HEADS, tokens, DIMS, generator=generator) for _ in range(LAYERS)]
    return Query(
        some_rows(tokens, seed=seed), [LayerQueries(one, DIMS**-0.5, HEADS) for one in asked]
    )


def surprisal_of(positions: Positions) -> np.ndarray:
    return np.random.default_rng(0).exponential(1.0, 20_000)[positions]


def best(
    how: Callable[[ArchiveSearch], Ranked],
    archive: Archive,
    query: Query,
    recall: RecallSettings,
    n: int = 100,
) -> set[int]:
    every = archive.positions
    ranked = how(ArchiveSearch(archive, every, query, recall, ROTATIONS, surprisal_of))
    assert (np.diff(ranked.positions) > 0).all()
    return set(ranked.positions[ranked.scores.mean(0).topk(n).indices.numpy()].tolist())


def scores_of(name: str, query: Query, rows: Rows, counts: Tensor | None = None) -> Tensor:
    """The retriever's scores [layers, n] of these rows, each of which stands for `counts` [n]."""
    candidates = Candidates(
        Archive(), rows.positions, query, ROTATIONS, counts=counts, fetched=rows
    )
    return retriever_called(name).score(candidates)


def filled(count: int = 6000) -> Archive:
    archive = Archive()
    archive.add(some_rows(count))
    return archive


def indexed(archive: Archive, recall: RecallSettings) -> Index:
    best(ArchiveSearch.proposed, archive, some_query(), recall)
    assert archive.index is not None
    assert set(proposed(archive.index)) <= set(archive.positions.tolist())
    return archive.index


def proposed(index: Index) -> list[int]:
    """All rows that are proposed for any of many queries."""
    found = [index.propose(some_query(seed, 20), -1.0) for seed in range(10)]
    every: list[int] = np.unique(np.concatenate(found)).tolist()
    return every


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small sample beside the proposed rows, so that the result depends on the proposed ones."""
    monkeypatch.setattr(archive_search, "SAMPLE", 500)
    monkeypatch.setattr(archive_search, "LOWEST_OF", (500, 500))


WEIGHTS: list[tuple[Weight, bool]] = [("surprisal", False), ("surprisal", True), ("none", False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retriever", "weight", "soft"),
    [*product(RETRIEVERS, ("surprisal", "none"), (False,)), ("attention", "surprisal", True)],
)
def test_an_index_finds_what_an_exhaustive_search_finds(
    retriever: str, weight: Weight, soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "PROPOSALS", 500)
    monkeypatch.setattr(index_module, "HITS", 25)
    archive, recall = filled(), RecallSettings(retriever, weight, soft=soft, index="on")
    shares = []
    for seed in range(1, 6):
        exact = best(ArchiveSearch.all, archive, some_query(seed), recall, 50)
        shares.append(
            len(exact & best(ArchiveSearch.proposed, archive, some_query(seed), recall, 50)) / 50
        )
    # Softened scores also depend on neighbours, which are unrelated in this data.
    assert np.mean(shares) >= (0.85 if soft else 0.9)


@pytest.mark.parametrize("weight", ["surprisal", "none"])
@pytest.mark.parametrize("retriever", ["mips", "cosine", "cosine-pairwise"])
def test_inner_products_with_a_token_are_its_scores(retriever: str, weight: Weight) -> None:
    rows, query, nats = some_rows(300), some_query(tokens=1), torch.linspace(0.1, 3.0, 300)
    vectors = IndexVectors(RecallSettings(retriever, weight), ROTATIONS, rows)
    vectors.learn(rows)
    scores = scores_of(retriever, query, rows).mean(0)
    (stored,), (asked,) = vectors.of_rows(rows, nats), vectors.of_query(query, -0.7)
    found = (stored @ asked.T)[:, 0]
    expected = (scores + 0.7) * nats if weight == "surprisal" else scores
    if weight == "none":  # a constant changes no order
        found = found - (found - expected).mean()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("weight", "soft"), WEIGHTS)
def test_inner_products_with_a_query_head_are_its_logits(weight: Weight, soft: bool) -> None:
    rows, query, nats = some_rows(300), some_query(tokens=3), torch.linspace(0.1, 3.0, 300)
    vectors = IndexVectors(RecallSettings("attention", weight, soft=soft), ROTATIONS, rows)
    vectors.learn(rows)
    stored, asked = vectors.of_rows(rows, nats), vectors.of_query(query, 0.0)
    bare = vectors.of_softmax(query) or asked
    for (layer, head), row, ask, plain in zip(vectors.heads, stored, asked, bare, strict=True):
        back = ROPE.cos_sin(torch.from_numpy(rows.written_at), torch.zeros(300))
        keys = ROPE.apply(rows.tensors[2 * layer], *back)[head]
        ours = query.layer_queries[layer].queries[2 * head : 2 * head + 2].flatten(0, 1)
        logits = ours @ keys.T * DIMS**-0.5
        more = nats.log() * (1 + soft) if weight == "surprisal" else 0.0
        for gap in (ask @ row.T - logits - more, plain @ row.T - logits):
            torch.testing.assert_close(gap, gap[:, :1].expand_as(gap), rtol=0, atol=1e-4)


@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_scores_are_softened_and_then_weighted(retriever: str) -> None:
    archive = filled(300)
    bare, found = (
        ArchiveSearch(archive, archive.positions, some_query(), recall, ROTATIONS, surprisal_of)
        .all()
        .scores
        for recall in (RecallSettings(retriever), RecallSettings(retriever, "surprisal", soft=True))
    )
    plain = weighted(softened(bare, archive.positions), surprisal_of(archive.positions))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_proposed_rows_are_scored_exactly(
    retriever: str, soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_search, "SAMPLE", 10_000)  # all rows are candidates
    monkeypatch.setattr(archive_search, "LOWEST_OF", (10_000, 10_000))
    archive, recall = filled(3000), RecallSettings(retriever, "surprisal", soft=soft, index="on")
    every = archive.positions
    exact = ArchiveSearch(archive, every, some_query(), recall, ROTATIONS, surprisal_of).all()
    found = ArchiveSearch(archive, every, some_query(), recall, ROTATIONS, surprisal_of).proposed()
    np.testing.assert_array_equal(found.positions, exact.positions)
    torch.testing.assert_close(found.scores, exact.scores, rtol=1e-4, atol=1e-6)


def test_a_row_that_stands_for_three_counts_as_three() -> None:
    rows, query = some_rows(50), some_query()
    thrice = rows.take(np.array([*range(50), 7, 7]))
    shares = torch.ones(50)
    shares[7] = 3.0
    found = scores_of("attention", query, rows, shares)
    expected = scores_of("attention", query, thrice)
    torch.testing.assert_close(found, expected[:, :50])


@pytest.mark.slow
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_rows_that_were_undone_are_not_proposed(retriever: str) -> None:
    archive, recall = filled(), RecallSettings(retriever, "surprisal", index="on")
    index = indexed(archive, recall)
    assert max(proposed(index)) >= 4000
    archive.truncate(4000)
    assert archive.index is index
    assert len(index) == 4000
    assert max(proposed(index)) < 4000


def test_a_reused_position_is_found_by_its_new_content() -> None:
    archive, recall, query = filled(), RecallSettings("attention", index="on"), some_query()
    indexed(archive, recall)
    archive.truncate(4000)
    archive.add(some_rows(2000, first=4000, seed=7))
    archive.index.update(archive, archive.positions, surprisal_of)  # type: ignore[union-attr]
    fresh = Archive()
    fresh.add(archive.fetch(archive.positions))
    exact = best(ArchiveSearch.all, fresh, query, recall)
    assert len(exact & best(ArchiveSearch.proposed, archive, query, recall)) >= 95


@pytest.mark.slow
def test_erasing_leaves_no_index_behind() -> None:
    """Its axes and centroids were learnt from the erased rows, too."""
    archive, recall = filled(), RecallSettings("attention", "surprisal", index="on")
    indexed(archive, recall)
    archive.remove(np.arange(100, 200))
    assert archive.index is None
    index = indexed(archive, recall)
    assert not set(range(100, 200)) & set(proposed(index))
    assert len(index) == 5900


def test_rows_dropped_at_the_limit_are_not_proposed() -> None:
    archive, recall = filled(), RecallSettings("mips", "surprisal", index="on")
    index = indexed(archive, recall)
    archive.limit = archive.nbytes // 2
    lost = archive.shrink(lambda positions: positions.astype(float))
    assert len(lost) >= 5 * SEGMENT_ROWS
    assert not set(lost.tolist()) & set(proposed(index))
    assert len(index) == len(archive)


def test_an_index_keeps_up_with_an_archive_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt_from: list[int] = []
    learn = IndexVectors.learn

    def note(self: IndexVectors, rows: Rows) -> None:
        learnt_from.append(len(rows))
        learn(self, rows)

    monkeypatch.setattr(IndexVectors, "learn", note)
    archive, recall = filled(500), RecallSettings("attention", "surprisal", index="on")
    first = indexed(archive, recall).nbytes
    for start in (500, 1500, 4000):
        archive.add(some_rows(2500, first=start, seed=start))
        exact = best(ArchiveSearch.all, archive, some_query(), recall)
        assert len(exact & best(ArchiveSearch.proposed, archive, some_query(), recall)) >= 90
        assert len(archive.index) == len(archive)  # type: ignore[arg-type]
    assert archive.index.nbytes > first  # type: ignore[union-attr]
    assert len(learnt_from) == 2


def test_another_retriever_gets_an_index_of_its_own() -> None:
    archive = filled(2000)
    first = indexed(archive, RecallSettings("mips", "surprisal", index="on"))
    assert indexed(archive, RecallSettings("mips", "surprisal", n=7, index="on")) is first
    assert indexed(archive, RecallSettings("mips", "surprisal", soft=True, index="on")) is not first
    assert indexed(archive, RecallSettings("mips", "none", index="on")) is not first


def test_neighbours_of_proposed_rows_can_be_candidates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, recall = filled(), RecallSettings("mips", span=2, index="on")
    index = indexed(archive, recall)
    some = np.array([0, 40, 5999])
    monkeypatch.setattr(index, "propose", lambda query, lowest: some)
    found = ArchiveSearch(
        archive, archive.positions, some_query(), recall, ROTATIONS, surprisal_of
    ).proposed()
    assert found.positions.tolist() == [0, 1, 2, 38, 39, 40, 41, 42, 5997, 5998, 5999]
