"""Archived rows come back for a turn, as the papers' equations say, and leave again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from held_rows import contents, same
from recall_rounds import as_if_at_zero, find, memory, restore, some_ids, talked
from session_files import columns
from sirchat.engine.engine import Engine
from sirchat.engine.eviction import recall_limit
from sirchat.engine.types import TurnRef
from sirchat.memory.key_values import KeyValues
from sirchat.memory.ledger import Role, State
from sirchat.models.model import LoadedModel

RETRIEVERS: list[str] = ["mips", "cosine", "cosine-pairwise"]


def by_the_equations(
    retriever: str, ours: KeyValues, theirs: KeyValues, model: LoadedModel
) -> list[list[float]]:
    """Equations (1) to (3) of the paper, entry by entry: one list for each layer."""
    found = []
    for layer in range(len(model.rotations)):
        rotations = (model.rotations[layer].key, model.rotations[layer].value)
        query, evicted = (
            [as_if_at_zero(each, 2 * layer + slot, rotations[slot]) for slot in (0, 1)]
            for each in (ours, theirs)
        )
        row = []
        for i in range(len(theirs)):
            alike = []
            for j in range(len(ours) if retriever == "cosine-pairwise" else 1):
                heads = []
                for head in range(len(query[0])):
                    total = 0.0
                    for mine, their in zip(query, evicted, strict=True):
                        a = mine[head, j] if retriever == "cosine-pairwise" else mine[head].mean(0)
                        b = their[head, i]
                        dot = sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))
                        size = 1.0 if retriever == "mips" else float(a.norm() * b.norm())
                        total += dot / size / 2
                    heads.append(total)
                alike.append(sum(heads) / len(heads))
            row.append(max(alike))
        found.append(row)
    return found


def are_the_best(scores: list[float], chosen: list[int], n: int) -> bool:
    """Whether no row left out scores more than a chosen one, but for rounding."""
    others = [one for number, one in enumerate(scores) if number not in set(chosen)]
    worst = min(scores[number] for number in chosen)
    return len(set(chosen)) == n and all(one <= worst + 1e-5 for one in others)


def searched(engine: Engine, model: LoadedModel, ids: list[int]) -> tuple[KeyValues, KeyValues]:
    """What a search sees: the turn's rows, and what is archived once the turn is read."""
    checkpoint, start = engine.checkpoint(), engine.ledger.seen
    list(engine.prefill(ids, [Role.USER] * len(ids), TurnRef(99, 99)))
    slots = np.flatnonzero(engine.ledger.held_positions >= start)
    held = engine.ledger.held_positions
    ours = engine.cache.first_written_rows(torch.from_numpy(slots), held[slots])
    archived = np.flatnonzero(engine.ledger.column("state")[:start] == State.ARCHIVED)
    theirs = engine.store.archive.fetch(archived)
    engine.undo(checkpoint)
    return ours, theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retriever", "family"), [*((one, "llama") for one in RETRIEVERS), ("cosine", "deepseek-mla")]
)
def test_what_comes_back_is_what_the_equations_choose(retriever: str, family: str) -> None:
    engine, model = talked(memory(retriever=retriever), rounds=6, family=family)
    ids = some_ids(99, 6)
    ours, theirs = searched(engine, model, ids)
    positions = theirs.positions.tolist()
    layers = by_the_equations(retriever, ours, theirs, model)
    found = find(engine, model, ids, 99)
    assert found is not None
    restore(engine, found, 6)
    mean = [sum(column) / len(layers) for column in zip(*layers, strict=True)]
    chosen = [positions.index(at) for at in engine.store.placement.wanted.tolist()]
    assert are_the_best(mean, chosen, 30)


@pytest.mark.slow
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_the_papers_query_is_the_recent_window_and_reads_nothing(retriever: str) -> None:
    engine, model = talked(memory(retriever=retriever, query="recent"), rounds=5)
    held = engine.ledger.held_positions
    slots = np.flatnonzero(held >= 4)
    ours = engine.cache.first_written_rows(torch.from_numpy(slots), held[slots])
    archived = np.flatnonzero(engine.ledger.column("state") == State.ARCHIVED)
    theirs = engine.store.archive.fetch(archived)
    passes = engine.cache.length
    found = find(engine, model, some_ids(99, 12), 99)
    assert engine.cache.length == passes
    assert found is not None
    layers = by_the_equations(retriever, ours, theirs, model)
    mean = [sum(column) / len(layers) for column in zip(*layers, strict=True)]
    at = np.searchsorted(found.positions, theirs.positions)
    np.testing.assert_allclose(found.scores[torch.from_numpy(at)], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_a_search_leaves_everything_as_it_was(retriever: str) -> None:
    engine, model = talked(memory("entropy", retriever=retriever))
    before, rows, logits = contents(engine), engine.ledger.rows(), engine.logits
    assert find(engine, model, some_ids(50, 30), 50) is not None
    assert same(contents(engine), before)
    assert columns(engine.ledger.rows()) == columns(rows)
    assert logits is not None
    assert engine.logits is not None
    assert torch.equal(engine.logits, logits)


def test_recall_leaves_the_conversation_room_to_read() -> None:
    assert recall_limit(200, 1020) == 200
    assert recall_limit(200, 124) == 116
    assert recall_limit(200, 16) == 8
    assert recall_limit(200, 8) == 0
    assert recall_limit(None, 1020) == 400
    assert recall_limit(None, 252) == 188
    assert recall_limit(None, 100) == 36
    assert recall_limit(None, 40) == 10
    assert recall_limit(None, 4000) == 1000  # a quarter
    engine, _ = talked(memory("sink", 40, n=200), rounds=3)
    assert [engine.evictor.recall_room(incoming) for incoming in (0, 16, 30)] == [28, 12, 0]


def test_an_empty_archive_is_not_searched_nor_any_for_a_turn_that_fills_the_budget() -> None:
    empty, model = talked(memory(), rounds=0)
    assert find(empty, model, some_ids(1, 20), 0) is None
    assert empty.ledger.seen == 0
    engine, model = talked(replace(memory("sink", 96), recall=None), rounds=1)
    engine.switcher.switch(memory("sink", 96, n=30))
    assert find(engine, model, some_ids(5, 300), 5) is None
    assert engine.ledger.seen == 20
