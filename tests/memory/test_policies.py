"""The eviction policies: the contract of all, and which rows each keeps, against slow oracles."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from held_rows import append_rows, keep_rows
from sirchat.errors import SettingError
from sirchat.memory.attention import PassAttention
from sirchat.memory.ledger import Flag, HeldRows, Ledger, Role
from sirchat.memory.policies import ALIASES, policy_class, policy_names
from sirchat.memory.policies.base import ScorePolicy
from sirchat.memory.policies.by_attention import H2o
from sirchat.memory.policies.by_position import Sink
from sirchat.memory.policies.by_surprisal import Entropy, Salience
from sirchat.memory.policies.check import contract_violations
from sirchat.memory.random_numbers import Purpose, uniform

SEED = 7
BOUNDED = [name for name in policy_names() if policy_class(name).bounded]

# Oracles: what each policy keeps, in plain Python.


@dataclass(frozen=True)
class Row:
    """A held row; surprisal and attention received are halved at the close of every round since."""

    position: int
    role: Role
    score: Fraction
    faded: Fraction
    attention: Fraction
    recent_attention: Fraction
    stats: dict[str, Fraction]
    key: float
    is_anchor: bool
    continues: bool
    is_pinned: bool
    is_sink: bool
    protected: bool


@dataclass(frozen=True)
class Case:
    """Held rows in plain Python and as a policy sees them, and how many must stay."""

    rows: list[Row]
    held: HeldRows
    num_keep: int

    def highest(self, rank: Callable[[Row], Any]) -> list[int]:
        """The protected rows and those of highest rank; of equals, the newer."""
        order = sorted(
            range(len(self.rows)),
            key=lambda i: (self.rows[i].protected, rank(self.rows[i]), i),
            reverse=True,
        )
        return sorted(order[: self.num_keep])

    def is_recent(self, row: Row, recent: int) -> bool:
        return row.position >= self.held.seen - recent


def newest(case: Case) -> list[int]:
    return case.highest(lambda row: row.position)


def highest_scores(case: Case, recent: int) -> list[int]:
    return case.highest(lambda r: (1, 0) if case.is_recent(r, recent) else (0, r.score))


def drawn_anew(case: Case) -> list[int]:
    return case.highest(lambda r: random_draw(Purpose.EVICTION, r.position, case.held.seen))


def evenly_spaced(case: Case) -> list[int]:
    stays = [i for i, row in enumerate(case.rows) if row.protected]
    others = [i for i, row in enumerate(case.rows) if not row.protected]
    room = case.num_keep - len(stays)
    stride = len(others) // room if room else 1
    return sorted(stays + [others[i * stride] for i in range(room)])


def highest_keys(case: Case, recent: int, sample: int | None) -> list[int]:
    """Recent rows first, then the members of the sample by key, then the newest of the others.

    Where not all have room, the oldest of the recent rows are no longer recent.
    """
    if sample is not None:
        fixed = sum(row.is_sink or row.is_pinned for row in case.rows)
        while recent and fixed + sample + recent > case.num_keep:
            recent -= 1
    free = [r for r in case.rows if not (case.is_recent(r, recent) or r.is_sink or r.is_pinned)]
    members = sorted(free, key=lambda r: r.key, reverse=True)[:sample]

    def rank(row: Row) -> tuple[int, float]:
        if case.is_recent(row, recent):
            return 2, 0
        return (1, row.key) if row in members else (0, row.position)

    return case.highest(rank)


def sentence_ends(case: Case) -> list[int]:
    """The rows after the last sentence end, then sentence ends, then the others; newest first."""
    last = max((r.position for r in case.rows if r.is_anchor), default=-1)
    return case.highest(lambda r: (r.position > last, r.is_anchor, r.position))


ORACLES: list[tuple[str, dict[str, Any], Callable[[Case], list[int]]]] = [
    ("window", {}, newest),
    ("sink", {}, newest),
    ("stream", {}, newest),
    ("entropy", {"recent": 0}, lambda case: highest_scores(case, 0)),
    ("entropy", {"recent": 5}, lambda case: highest_scores(case, 5)),
    ("random", {}, drawn_anew),
    ("interval", {}, evenly_spaced),
    ("reservoir", {"recent": 5}, lambda case: highest_keys(case, 5, None)),
    ("reservoir", {"recent": 5, "sample": 6}, lambda case: highest_keys(case, 5, 6)),
    ("anchor", {}, sentence_ends),
]


STATS = ("key_norm", "key_similarity", "value_norm")


def column(rows: list[Row], name: str) -> Any:
    return torch.tensor([float(row.stats[name]) for row in rows], dtype=torch.float64)


@st.composite
def cases(pick: st.DrawFn) -> Case:
    """Several rounds, some rows of which are gone; sinks, pins and the newest are protected."""
    random = Random(pick(st.integers(0, 2**32)))
    ledger, sinks, newest_protected = Ledger(SEED), random.choice([0, 2]), random.choice([0, 8])
    scores: list[Fraction] = []
    flags: list[int] = []
    rounds, continuing = random.randint(1, 6), random.choice([0, 7, 200])
    roles: list[Role] = []
    of_round: list[int] = []
    attention: list[Fraction] = []
    queries: list[list[Fraction]] = []  # from each query so far, its weights
    for number in range(rounds):
        length = random.randint(1, 12)
        new_roles = random.choices([Role.USER, Role.ASSISTANT, Role.TEMPLATE], k=length)
        # Odd or zero, so that halving never makes equal scores of different rounds.
        nats = random.choices([0, 1, 3, 5, 7], k=length)
        kinds = [0, Flag.ANCHOR, Flag.PINNED, Flag.CONTINUES]
        new_flags = random.choices(kinds, [7, 2, 1, continuing], k=length)
        append_rows(ledger, [float(n) for n in nats], number, new_flags, roles=new_roles)
        roles, of_round = roles + new_roles, of_round + [number] * length
        looks = [Fraction(random.randint(1, 64), 64) for _ in roles]
        weights = np.zeros((length, len(roles)), np.float32)  # one row for each token just read
        weights[-1] = [float(one) for one in looks]
        passed = PassAttention.from_weights(weights, window=2)
        ledger.attention.add(np.arange(len(roles)), [passed], ledger.log_decay, window=2)
        queries += [[Fraction(0)] * len(roles)] * (length - 1) + [looks]
        attention += [Fraction(0)] * length
        attention = [(one + look) / 2 for one, look in zip(attention, looks, strict=True)]
        ledger.apply_decay(0.5)
        scores += [Fraction(n, 2 ** (rounds - number)) for n in nats]
        flags += new_flags
    held = sorted(random.sample(range(len(scores)), random.randint(1, len(scores))))
    keep_rows(ledger, held)

    def row(p: int) -> Row:
        is_sink, is_pinned = p < sinks, bool(flags[p] & Flag.PINNED)
        protected = is_sink or is_pinned or p >= len(scores) - newest_protected
        key, is_anchor = random_draw(Purpose.ARRIVAL, p), bool(flags[p] & Flag.ANCHOR)
        faded = Fraction(1, 2 ** (rounds - of_round[p]))
        recent = sum((one[p] for one in queries[-2:] if p < len(one)), Fraction(0))
        stats = {name: Fraction(random.randint(1, 64), 8) for name in STATS}
        known = (p, roles[p], scores[p], faded, attention[p], recent, stats)
        continues = bool(flags[p] & Flag.CONTINUES)
        return Row(*known, key, is_anchor, continues, is_pinned, is_sink, protected)

    rows = [row(position) for position in held]
    protected = [row.protected for row in rows]
    view = ledger.view(ledger.held_positions, sinks=sinks, protected=np.array(protected))
    view = replace(view, **{name: column(rows, name) for name in STATS})
    return Case(rows, view, random.randint(sum(protected), len(rows)))


@given(case=cases())
def test_a_policy_keeps_what_its_description_says(case: Case) -> None:
    for name, options, oracle in ORACLES:
        policy = policy_class(name)(**options)
        assert policy.keep(case.held, case.num_keep).tolist() == oracle(case), (name, options)


def words(rows: list[Row]) -> list[list[Row]]:
    """Runs of rows that belong to one word, of at most 8 tokens."""
    found: list[list[Row]] = []
    for row in rows:
        joins = row.continues and found and found[-1][-1].position == row.position - 1
        if joins and len(found[-1]) < 8:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def salient(case: Case, row: Row, factors: set[str]) -> float:
    """The salience score of a row from the named factors only."""

    def nats(one: Row) -> float:
        return max(1e-9, float(one.score / one.faded))

    def alone(one: Row) -> float:
        word = next(word for word in words(case.rows) if one in word)
        total = sum(map(nats, word)) if "whole_words" in factors else nats(one)
        twice = "user_weight" in factors and one.role is Role.USER
        left_out = "template" in factors and one.role is Role.TEMPLATE
        return 0.0 if left_out else total * (2 if twice else 1) * float(one.faded)

    return beside(case, row, alone) if "neighbours" in factors else alone(row)


def beside(case: Case, row: Row, alone: Callable[[Row], float]) -> float:
    """The score of a row alone, or half of that of the row before or after, if that is more."""
    shared = [alone(one) / 2 for one in case.rows if abs(one.position - row.position) == 1]
    return max(alone(row), *shared, 0.0) if alone(row) else 0.0


def age(case: Case, row: Row) -> int:
    return case.held.seen - row.position


ALL = {"whole_words", "user_weight", "template", "neighbours"}
SCORES: list[tuple[str, dict[str, Any], Callable[[Case, Row], float]]] = [
    ("h2o", {}, lambda case, row: float(row.attention)),
    ("h2o", {"lifetime": True}, lambda case, row: float(row.attention) / age(case, row)),
    ("h2o", {"values": True}, lambda case, row: float(row.attention * row.stats["value_norm"])),
    ("knorm", {}, lambda case, row: -float(row.stats["key_norm"])),
    ("keydiff", {}, lambda case, row: -float(row.stats["key_similarity"])),
    ("tova", {}, lambda case, row: float(row.recent_attention)),
    ("snapkv", {}, lambda case, row: float(row.recent_attention)),
    ("salience", {"user_weight": 2}, lambda case, row: salient(case, row, ALL)),
    *(
        (
            "salience",
            {"user_weight": 2, off: 1 if off == "user_weight" else False},
            lambda case, row, off=off: salient(case, row, ALL - {off}),
        )
        for off in sorted(ALL)
    ),
]


@given(case=cases())
def test_a_score_is_what_its_description_says(case: Case) -> None:
    for name, options, score in SCORES:
        policy = policy_class(name)(**{"recent": 5, **options})
        assert isinstance(policy, ScorePolicy)
        wanted = [score(case, row) for row in case.rows]
        found = policy.score(case.held)
        shown = found.exp() if policy.log_scale else found
        assert shown.tolist() == pytest.approx(wanted, rel=1e-6), (name, options)


def all_held(ledger: Ledger) -> HeldRows:
    return ledger.view(ledger.held_positions, sinks=0, protected=np.zeros(ledger.seen, bool))


def test_rows_without_tracked_attention_rank_in_the_middle() -> None:
    ledger = Ledger()
    append_rows(ledger, [1.0] * 4)
    looks = np.diag([4.0, 1.0, 2.0]).astype(np.float32)
    ledger.attention.add(np.arange(1, 4), [PassAttention.from_weights(looks)], 0.0)
    assert H2o(recent=0).keep(all_held(ledger), 3).tolist() == [0, 1, 3]


def test_a_thousand_rounds_fade_to_less_than_a_float_holds_and_still_rank_rightly() -> None:
    ledger = Ledger()
    for number in range(1000):
        append_rows(ledger, [8.0, 3.0], number)
        ledger.apply_decay(0.4)
    held = all_held(ledger)
    assert Salience(recent=0).keep(held, 3).tolist() == [1997, 1998, 1999]
    for policy in (Salience(recent=0, neighbours=False), Entropy(recent=0)):
        assert policy.keep(held, 3).tolist() == [1996, 1998, 1999]
        assert policy.keep(held, 1998).tolist() == [0, 2, *range(4, 2000)]


@given(case=cases())
def test_every_policy_keeps_the_contract(case: Case) -> None:
    before = deepcopy(vars(case.held))
    for name in BOUNDED:
        kept = policy_class(name)().keep(case.held, case.num_keep)
        assert kept.dtype == torch.int64, name
        rows = kept.tolist()
        assert len(rows) == case.num_keep, name
        assert rows == sorted(set(rows)), name
        assert set(rows) <= set(range(len(case.rows))), name
        assert {i for i, row in enumerate(case.rows) if row.protected} <= set(rows), name
        assert torch.equal(policy_class(name)().keep(case.held, case.num_keep), kept), name
        for column, values in vars(case.held).items():
            assert np.array_equal(values, before[column]), (name, column)


def test_every_policy_that_evicts_has_an_oracle() -> None:
    assert {ALIASES.get(name, name) for name, _, _ in [*ORACLES, *SCORES]} == set(BOUNDED)
    assert [name for name in policy_names() if name not in BOUNDED] == ["full"]


def random_draw(purpose: Purpose, position: int, seen: int = 0) -> float:
    return float(uniform(SEED, purpose, np.array([position]), seen)[0])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("entropi", "'entropi' is unknown; .*did you mean entropy"),
        ("", "'' is unknown"),
        ("base", "'base' is unknown"),
        ("os:path", "os:path is not a sirchat policy"),
        ("sirchat.nowhere:Policy", "cannot be imported"),
    ],
)
def test_what_names_no_policy_is_refused(name: str, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        policy_class(name)


@dataclass(frozen=True)
class Odd(Sink):
    """Returns one number for all rows together."""

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        return {"odd": torch.zeros(())}


def test_scores_and_factors_are_a_number_for_each_row() -> None:
    assert not contract_violations(Sink())
    assert contract_violations(Odd()) == [
        "score() and log_factors() must return tensors with one number for each row"
    ]
