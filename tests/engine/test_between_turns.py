"""Eviction between turns: SirLLM's Algorithm 1, written out plainly, and what is around it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from attacking import MANY
from chatting import babbler, session
from engine_steps import CONTEXT, check_whole, evicted, generate, prefill, some_ids, state_of
from families import BigramModel
from sirchat.chat.events import Evicted, TurnDone
from sirchat.config.profile_files import resolve
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.memory.policies.by_surprisal import Entropy

EXACT = CacheSettings(
    Entropy(recent=0), budget=100, sinks=4, decay=0.8, protect=False, evict="between-turns"
)


class Algorithm1:
    """Algorithm 1 of SirLLM over positions: a cache of size L with entropies E, in plain Python."""

    def __init__(self, model: BigramModel, size: int, sinks: int, decay: float) -> None:
        self.model, self.size, self.sinks, self.decay = model, size, sinks, decay
        self.entropy: dict[int, float] = {}
        self.ids: list[int] = []

    def turn_begins(self) -> list[int]:
        """`if KV cache size > L`: keep the sinks and the top k; returns what goes."""
        if len(self.entropy) <= self.size:
            return []
        others = [position for position in self.entropy if position >= self.sinks]
        others.sort(key=lambda position: (self.entropy[position], position))
        gone = sorted(others[: len(self.entropy) - self.size])
        for position in gone:
            del self.entropy[position]
        return gone

    def turn_ends(self, ids: list[int]) -> None:
        """Entropies of input and response join E; then all decay."""
        for token in ids:
            surprisal = math.inf  # of the first token, which is a sink
            if self.ids:
                row = self.model.table[self.ids[-1]].double()
                surprisal = float(row.logsumexp(0) - row[token])
            self.entropy[len(self.ids)] = surprisal
            self.ids.append(token)
        self.entropy = {position: e * self.decay for position, e in self.entropy.items()}


@pytest.mark.parametrize("seed", range(MANY or 2))
def test_what_is_held_is_what_algorithm_1_holds_after_every_turn(seed: int) -> None:
    draw = random.Random(seed)
    model = BigramModel(context_length=2_000)
    size, sinks, decay = draw.randint(40, 150), draw.randint(0, 6), draw.choice([1.0, 0.9, 0.6])
    settings = replace(EXACT, budget=size, sinks=sinks, decay=decay)
    engine, paper = Engine(model, settings), Algorithm1(model, size, sinks, decay)
    for number in range(14):
        ids = some_ids(draw.randint(1, 2 * size), seed=100 * seed + number)
        reply, turn = draw.randint(1, 60), TurnRef(2 * number, number)
        gone = evicted(engine.evictor.make_room_for_turn(len(ids), reply, turn))
        assert [position for one in gone for position in one] == paper.turn_begins()
        assert engine.resident == len(paper.entropy) <= size
        within = [*prefill(engine, ids, turn.turn), *generate(engine, reply, turn.turn + 1)]
        assert not evicted(within)
        engine.decay_at_round_end()
        read = engine.ledger.column("token_id")[len(paper.ids) : engine.ledger.seen].tolist()
        paper.turn_ends(read)
        assert engine.ledger.held_positions.tolist() == sorted(paper.entropy)
        assert engine.resident == engine.cache.length <= size + len(ids) + reply
    assert engine.ledger.seen > 3 * size


def test_a_chat_under_a_sirllm_profile_exceeds_its_cache_by_one_round_at_most() -> None:
    profile = resolve("sirllm-rps", {"model": "babbler", "budget": 128, "max_new_tokens": 20}, {})
    chat = session(babbler(), **profile.model_dump(exclude={"model"}))
    most = 0
    for _ in range(6):
        before = chat.seen
        events = [e for e in chat.ask("word " * 40) if isinstance(e, (Evicted, TurnDone))]
        for event in events:
            if isinstance(event, Evicted):
                assert event.resident == 128
        assert Evicted not in [type(event) for event in events[1:]]
        assert chat.resident <= 128 + chat.seen - before
        most = max(most, chat.resident)
    assert most > 128
    snapshot = chat.snapshot()
    assert snapshot.budget == 128
    assert len(snapshot.evicted_next) == chat.resident - 128
    (next_evicted,) = [e for e in chat.ask("More.") if isinstance(e, Evicted)]
    assert set(next_evicted.positions) == set(snapshot.evicted_next)


def test_the_cache_has_room_for_turn_and_reply_before_they_come() -> None:
    engine = Engine(BigramModel(), EXACT)
    for number in range(4):
        engine.evictor.make_room_for_turn(60, 30, TurnRef(2 * number, number))
        room = engine.cache.capacity
        prefill(engine, some_ids(60, number), 2 * number)
        generate(engine, 30, 2 * number + 1)
        assert engine.cache.capacity == room
        check_whole(engine)
    assert room == 190
    prefill(engine, some_ids(80), 8)  # a turn that nobody announced
    assert engine.resident == 190 + 80
    check_whole(engine)


def test_a_turn_beyond_the_models_context_evicts_to_stay_within_it() -> None:
    engine = Engine(BigramModel(), EXACT)
    engine.evictor.make_room_for_turn(500, 20, TurnRef(0, 0))
    assert evicted(prefill(engine, some_ids(500)))
    assert engine.resident == CONTEXT
    generate(engine, 20)
    check_whole(engine)
    engine.evictor.make_room_for_turn(10, 20, TurnRef(2, 1))
    assert engine.resident == 100


def test_switching_it_on_evicts_nothing_and_off_keeps_the_budget_at_once() -> None:
    engine = Engine(BigramModel(), replace(EXACT, archive=10**6))
    prefill(engine, some_ids(180))
    before = state_of(engine)[:2]
    assert not engine.switcher.switch(replace(engine.settings, decay=0.5))
    assert state_of(engine)[:2] == before
    engine.switcher.switch(replace(engine.settings, evict="when-full"))
    assert engine.resident == 100
    engine.switcher.switch(replace(engine.settings, evict="between-turns", decay=0.7))
    assert engine.resident == 100
    engine.switcher.switch(replace(engine.settings, decay=0.8))  # as at the last forward pass
    assert state_of(engine)[:2] == before
    check_whole(engine)
