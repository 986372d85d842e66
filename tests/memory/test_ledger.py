"""The ledger: every token ever read, which of them are held, and the newest ones' vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from held_rows import append_rows, keep_rows
from sirchat.memory.ledger import Flag, Ledger, Role, State, TokenVectors

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
            gone = keep_rows(ledger, kept)
            assert gone == [p for i, p in enumerate(held) if i not in what]
            held = [held[i] for i in kept]
        else:
            ledger.apply_decay(what)
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
        there = State.HELD if position in held else State.NOT_STORED
        assert ledger.column("state")[position] == there
    view = ledger.view(ledger.held_positions, sinks=2, protected=np.zeros(len(held), bool))
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
        append_rows(ledger, [i / 8 for i in ids], ids=ids)
        keep_rows(ledger, range(max(0, ledger.held_count - 50), ledger.held_count))
    assert ledger.column("token_id").tolist() == list(range(count))
    assert ledger.column("surprisal").tolist() == [i / 8 for i in range(count)]
    assert ledger.held_positions.tolist() == list(range(count - 50, count))
    table = vars(ledger)["_rows"]
    assert table.nbytes <= 40 * count


def append(ledger: Ledger, rows: list[dict[str, Any]], turn: int) -> None:
    ledger.append(
        [row["token_id"] for row in rows],
        [row["surprisal"] for row in rows],
        turn=turn,
        round=turn // 2,
        roles=[row["role"] for row in rows],
        flags=[row["flags"] for row in rows],
    )


vector_steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 90)),
    st.tuples(st.just("skip"), st.integers(1, 5)),  # read while nothing was wanted
    st.tuples(st.just("drop"), st.integers(0, 300)),
    st.tuples(st.just("truncate"), st.integers(0, 300)),
    st.tuples(st.just("erase"), st.integers(0, 300)),
)


@given(st.lists(vector_steps, max_size=12), st.data())
def test_a_mean_is_that_of_a_list_with_an_entry_for_each_token(
    played: list[tuple[str, int]], data: st.DataObject
) -> None:
    vectors, known = TokenVectors(), list[Tensor | None]()
    for what, number in played:
        if what == "append":
            numbers = torch.rand(number, 3)
            if known and known[-1] is None:  # a gap: those before it are forgotten
                known = [None] * len(known)
            vectors.append(len(known), numbers)
            known += numbers.unbind()
        elif what == "skip":
            known += [None] * number
        elif what == "drop":
            vectors.drop_before(number)
            known[:number] = [None] * min(number, len(known))
        elif what == "truncate":
            known = known[:number]
            vectors.truncate(len(known))
        elif number < len(known):
            vectors.erase(np.arange(number, min(number + 3, len(known))))
            known[number : number + 3] = [
                None if one is None else one * torch.nan for one in known[number : number + 3]
            ]
        start = data.draw(st.integers(0, len(known)))
        end = data.draw(st.integers(start, len(known)))
        wanted = [one for one in known[start:end] if one is not None and not one.isnan().any()]
        found = vectors.mean(start, end)
        if start < end and len(wanted) == end - start:
            assert found is not None
            torch.testing.assert_close(found, torch.stack(wanted).mean(0))
        else:
            assert found is None


def test_undo_and_erasing_reach_them_through_the_ledger() -> None:
    ledger = Ledger()
    for start in (0, 4):
        roles = [Role.USER] * 4
        ledger.append([5] * 4, [1.0] * 4, turn=start, round=start, roles=roles, flags=[0] * 4)
        ledger.token_vectors.append(start, torch.rand(4, 3))
    keep_rows(ledger, range(4))
    ledger.erase(np.array([5]))
    assert ledger.token_vectors.mean(4, 6) is None
    assert ledger.token_vectors.mean(6, 8) is not None
    ledger.truncate(4, 0.0)
    assert ledger.token_vectors.mean(0, 4) is not None
    assert ledger.token_vectors.mean(4, 5) is None


def test_what_was_dropped_takes_no_memory() -> None:
    vectors = TokenVectors()
    for start in range(0, 10_000, 100):
        vectors.append(start, torch.rand(100, 3))
        vectors.drop_before(start + 100)
        assert len(vectors._rows) <= 100
