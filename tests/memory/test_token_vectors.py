"""The encoder's numbers of the newest tokens, against a list that has one entry for each token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from held_rows import keep_rows
from sirchat.memory.ledger import Ledger, Role
from sirchat.memory.token_vectors import TokenVectors

steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 90)),
    st.tuples(st.just("skip"), st.integers(1, 5)),  # read while nothing was wanted
    st.tuples(st.just("drop"), st.integers(0, 300)),
    st.tuples(st.just("truncate"), st.integers(0, 300)),
    st.tuples(st.just("erase"), st.integers(0, 300)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=12), st.data())
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
