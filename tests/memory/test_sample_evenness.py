"""Whether a sampling policy keeps every token of a stream with the same probability."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from attacking import MANY
from engine_steps import SAMPLER, prefill
from families import BigramModel
from held_rows import append_rows, keep_rows
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.memory.ledger import Ledger, MovedRows, Role
from sirchat.memory.policies import policy_class
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.by_chance import Reservoir
from sirchat.memory.random_numbers import Purpose, uniform

SEED = 7
STREAM, BUDGET, SINKS = 8_000, 644, 4
CHUNK = (BUDGET - SINKS) // 4
ONE_ROUND, SHORT_ROUNDS = [STREAM], [CHUNK] * (STREAM // CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ONE_ROUND, SHORT_ROUNDS], ids=["one round", "short rounds"])
def test_a_reservoir_keeps_every_tenth_of_the_stream_alike(rounds: list[int]) -> None:
    assert evenness(Reservoir(), rounds) > 0.01


def test_drawing_anew_at_each_eviction_favours_new_tokens() -> None:
    """The same measurement finds the bias of `random`."""
    assert evenness(policy_class("random")(), SHORT_ROUNDS) < 1e-6


def test_the_largest_keys_lie_evenly_in_the_stream() -> None:
    keys = np.stack([uniform(seed, Purpose.ARRIVAL, np.arange(STREAM)) for seed in range(400)])
    largest = np.argpartition(keys, -CHUNK, axis=1)[:, -CHUNK:]
    assert chisquare(np.histogram(largest, bins=10, range=(0, STREAM))[0]).pvalue > 0.01


@pytest.mark.parametrize("policy", [Reservoir(), Reservoir(sample=300)], ids=repr)
def test_the_measurement_evicts_as_the_engine_does(policy: Reservoir) -> None:
    rounds = [2500, 500, 120, 1700]
    model = BigramModel()
    engine = Engine(model, CacheSettings(policy, BUDGET, SINKS), seed=SEED)
    for number, length in enumerate(rounds):
        ids = [5] * length
        list(engine.prefill(ids, [Role.USER] * length, TurnRef(number, number)))
    held, _ = read_stream(policy, rounds, SEED)
    assert engine.ledger.held_positions.tolist() == held.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MANY or 1))
@pytest.mark.parametrize(("sinks", "sample", "recent"), [(4, 60, 32), (2, 20, 40), (0, 90, 20)])
def test_start_sample_and_recent_fill_the_budget_as_in_the_papers_figure_4(
    sinks: int, sample: int, recent: int, seed: int
) -> None:
    """Whatever rounds are read, and whatever is protected, an old token's chance is the paper's."""
    budget = sinks + sample + recent
    settings = CacheSettings(Reservoir(recent, sample), budget, sinks)
    engine, draw = Engine(BigramModel(), settings, seed=seed), Random(seed)
    for number in range(16):
        ids = [5] * draw.randint(60, 150)
        list(engine.prefill(ids, [Role.USER] * len(ids), TurnRef(number, number)))
        if engine.resident < budget:
            continue
        seen, held = engine.ledger.seen, engine.ledger.held_positions
        old = np.arange(sinks, seen - recent)
        keys = uniform(seed, Purpose.ARRIVAL, old)
        members = np.sort(old[keys.argsort()[len(old) - sample :]])
        assert held[:sinks].tolist() == list(range(sinks))
        assert held[sinks : sinks + sample].tolist() == members.tolist()
        assert held[-recent:].tolist() == list(range(seen - recent, seen))
        assert len(held) == budget
    assert engine.ledger.seen > 8 * budget


def test_a_reply_takes_room_from_the_recent_window_alone() -> None:
    engine = Engine(BigramModel(), CacheSettings(Reservoir(40, 80), 124, 4), seed=SEED)
    prefill(engine, [5] * 400)
    evictions = 0
    for record in Generation(
        engine, SAMPLER, TurnRef(1, 0), stop_ids=frozenset(), max_new_tokens=90
    ):
        if isinstance(record, MovedRows) and not record.restored:
            held, window = engine.ledger.held_positions[:-1], 124 - 4 - 80 - 8  # one was read since
            old = np.arange(4, record.seen - window)
            members = old[uniform(SEED, Purpose.ARRIVAL, old).argsort()[-80:]]
            assert set(held.tolist()) == {*range(4), *members, *range(old[-1] + 1, record.seen)}
            evictions += 1
    assert evictions > 5


def evenness(policy: Policy, rounds: list[int]) -> float:
    """Chi-square p of the kept tokens in each tenth of the stream, but for sinks and the newest."""
    counts = np.zeros(10)
    for seed in range(MANY or 10):
        held, end = read_stream(policy, rounds, seed)
        old = held[(held >= SINKS) & (held < end)]
        counts += np.histogram(old, bins=10, range=(SINKS, end))[0]
    return float(chisquare(counts).pvalue)


def read_stream(policy: Policy, rounds: list[int], seed: int) -> tuple[NDArray[np.int64], int]:
    """Read rounds of these lengths as the engine does.

    Returns the positions held at the end, and the first position that the last eviction protected
    as new.
    """
    ledger, room, end = Ledger(seed), BUDGET - SINKS, 0
    recent = getattr(policy, "recent", 0)
    for number, length in enumerate(rounds):
        opened = ledger.seen
        for start in range(0, length, room // 4):
            count = min(room // 4, length - start)
            if ledger.held_count + count > BUDGET:
                newest = max(opened, ledger.seen - policy.newest_room(room) // 2)
                at = ledger.held_positions
                held = ledger.view(
                    ledger.held_positions, sinks=SINKS, protected=(at < SINKS) | (at >= newest)
                )
                keep_rows(ledger, policy.keep(held, BUDGET - count))
                end = min(newest, held.seen - recent)
            append_rows(ledger, [1.0] * count, number)
    return ledger.held_positions, end
