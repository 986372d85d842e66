"""The policy `reservoir` in a stream: which tokens are in its sample, and what else is held."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from attacking import MANY
from engine_steps import SAMPLER, prefill
from families import BigramModel
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.memory.ledger import MovedRows, Role
from sirchat.memory.policies.by_chance import Reservoir
from sirchat.memory.random_numbers import Purpose, uniform

SEED = 7


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
