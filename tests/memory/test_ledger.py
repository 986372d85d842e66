"""The ledger: every token ever read, and which of them are held."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sirchat.memory.ledger import Flag, Ledger, Role, State

token = st.fixed_dictionaries(
    {
        "token_id": st.integers(0, 2**31 - 1),
        "surprisal": st.floats(0, 30, width=32),
        "role": st.sampled_from(Role),
        "flags": st.integers(0, 3),
    }
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(token, max_size=8)),
        st.tuples(st.just("keep"), st.sets(st.integers(0, 60))),
        st.tuples(st.just("close"), st.floats(0.1, 1)),
    ),
    max_size=12,
)


@given(steps)
def test_every_column_is_what_was_appended_and_held_rows_are_what_was_kept(
    plan: list[tuple[str, Any]],
) -> None:
    ledger, rows, held = Ledger(seed=3), list[dict[str, Any]](), list[int]()
    for turn, (step, what) in enumerate(plan):
        if step == "append":
            append(ledger, what, turn)
            held += range(len(rows), len(rows) + len(what))
            rows += [{**row, "turn": turn, "round": turn // 2, "decay": 1.0} for row in what]
        elif step == "keep":
            kept = sorted(i for i in what if i < len(held))
            gone = ledger.keep(torch.tensor(kept, dtype=torch.int64))
            assert gone.tolist() == [p for i, p in enumerate(held) if i not in what]
            held = [held[i] for i in kept]
        else:
            ledger.close_round(what)
            for row in rows:
                row["decay"] *= what
    check(ledger, rows, held)


positions = st.sets(st.integers(0, 40))
pinning = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(token, max_size=8)),
        st.tuples(st.sampled_from(["pin", "unpin", "pin_only", "erase", "exclude"]), positions),
        st.tuples(st.sampled_from(["truncate", "load"]), st.integers(0, 40)),
    ),
    max_size=12,
)


@given(pinning)
def test_what_is_pinned_is_known_whatever_happened(plan: list[tuple[str, Any]]) -> None:
    ledger = Ledger()
    for step, what in plan:
        before = ledger.pinned_positions
        if step == "append":
            append(ledger, what, turn=0)
            if not any(row["flags"] & Flag.PINNED for row in what):
                assert ledger.pinned_positions is before  # a long stream is not searched for it
        elif step == "truncate":
            ledger.truncate(min(what, ledger.seen), 0.0)
        elif step == "load":
            ledger.load(ledger.rows()[: min(what, ledger.seen)], np.zeros(0, np.int64), 0.0)
        else:
            at = np.array(sorted(one for one in what if one < ledger.seen), np.int64)
            match step:
                case "pin" | "unpin":
                    ledger.pin(at, step == "pin")
                case "pin_only":
                    ledger.pin_only(at)
                case "exclude":
                    ledger.flag(Flag.EXCLUDED, at, True)
                    assert ledger.pinned_positions is before
                case _:
                    ledger.erase(at)
        is_pinned = [bool(flags & Flag.PINNED) for flags in ledger.column("flags").tolist()]
        assert ledger.pinned_positions.tolist() == np.flatnonzero(is_pinned).tolist()


def check(ledger: Ledger, rows: list[dict[str, Any]], held: list[int]) -> None:
    assert ledger.seen == len(rows)
    assert ledger.held_count == len(held)
    assert ledger.held_positions.tolist() == held
    for name in ("token_id", "surprisal", "role", "flags", "turn", "round"):
        assert ledger.column(name).tolist() == [row[name] for row in rows]
    for position in range(len(rows)):
        there = State.HELD if position in held else State.GONE
        assert ledger.column("state")[position] == there
    view = ledger.held(sinks=2, protected=np.zeros(len(held), bool))
    assert view.position.tolist() == held
    assert view.is_sink.tolist() == [p < 2 for p in held]
    assert view.is_anchor.tolist() == [bool(rows[p]["flags"] & Flag.ANCHOR) for p in held]
    assert view.is_pinned.tolist() == [bool(rows[p]["flags"] & Flag.PINNED) for p in held]
    assert view.newest(3).tolist() == [p >= len(rows) - 3 for p in held]
    assert view.log_decayed_surprisal.exp().tolist() == pytest.approx(
        [rows[p]["surprisal"] * rows[p]["decay"] for p in held]
    )


def test_a_long_stream_keeps_its_rows_and_costs_forty_bytes_a_token() -> None:
    ledger, count = Ledger(), 2**16
    for start in range(0, count, 100):
        ids = list(range(start, min(count, start + 100)))
        append_ids(ledger, ids, [i / 8 for i in ids])
        ledger.keep(torch.arange(max(0, ledger.held_count - 50), ledger.held_count))
    assert ledger.column("token_id").tolist() == list(range(count))
    assert ledger.column("surprisal").tolist() == [i / 8 for i in range(count)]
    assert ledger.held_positions.tolist() == list(range(count - 50, count))
    table = vars(ledger)["_rows"]
    assert table.nbytes <= 40 * count


def test_arrival_keys_depend_on_seed_and_position_alone() -> None:
    at_once, one_by_one, other = Ledger(5), Ledger(5), Ledger(6)
    append_ids(at_once, [7] * 40, [1.0] * 40)
    append_ids(other, [7] * 40, [1.0] * 40)
    for i in range(40):
        append_ids(one_by_one, [i], [2.0])
        one_by_one.keep(torch.tensor([0]))
    keys = at_once.column("arrival_key").tolist()
    assert keys == one_by_one.column("arrival_key").tolist()
    assert not set(keys) & set(other.column("arrival_key").tolist())


def test_a_first_token_has_no_surprisal_and_ranks_as_its_chunks_maximum() -> None:
    ledger = Ledger(unknown_surprisal=4.0)
    append_ids(ledger, [1, 2], [math.nan, 0.5])
    append_ids(ledger, [3], [2.5])
    ledger.rank_first_token(3)
    append_ids(ledger, [4], [9.0])
    assert np.isnan(ledger.column("surprisal")[0])
    assert scores(ledger) == [2.5, 0.5, 2.5, 9.0]


def test_a_first_token_that_came_alone_ranks_by_unknown_surprisal() -> None:
    ledger = Ledger(unknown_surprisal=4.0)
    append_ids(ledger, [1], [math.nan])
    ledger.rank_first_token(1)
    append_ids(ledger, [4], [9.0])
    assert scores(ledger) == [4.0, 9.0]


def test_decay_applies_to_the_closed_round_and_not_to_the_next() -> None:
    ledger = Ledger()
    for _ in range(3):
        append_ids(ledger, [1], [8.0])
        ledger.close_round(0.5)
    assert ledger.held(
        sinks=0, protected=np.zeros(3, bool)
    ).log_decayed_surprisal.exp().tolist() == (pytest.approx([1.0, 2.0, 4.0]))


def append(ledger: Ledger, rows: list[dict[str, Any]], turn: int) -> None:
    ledger.append(
        [row["token_id"] for row in rows],
        [row["surprisal"] for row in rows],
        turn=turn,
        round=turn // 2,
        roles=[row["role"] for row in rows],
        flags=[row["flags"] for row in rows],
    )


def append_ids(ledger: Ledger, ids: list[int], surprisal: list[float]) -> None:
    nothing = [0] * len(ids)
    ledger.append(ids, surprisal, turn=0, round=0, roles=nothing, flags=nothing)


def scores(ledger: Ledger) -> list[float]:
    return [float(nats) for nats in ledger.surprisal_of(ledger.held_positions)]
