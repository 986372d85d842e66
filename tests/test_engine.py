"""The engine: the budget is a hard bound, every surprisal is right, and failures leave no trace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from families import HELD, BigramModel, build, loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sirchat.engine import Engine
from sirchat.errors import ContextFullError, SettingError
from sirchat.memory.ledger import Flag, Held, Role
from sirchat.memory.policies import policy_class, policy_names
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.entropy import Entropy
from sirchat.memory.policies.full import Full
from sirchat.memory.policies.sink import Sink
from sirchat.model import LoadedModel, wrap_model
from sirchat.records import Checkpoint, Evicted, Generated, Memory, Place, Read, Restored, Stopped
from sirchat.sampling import Sampler, Sampling

Record = Read | Evicted | Restored | Generated | Stopped
BOUNDED = [name for name in policy_names() if policy_class(name).bounded]
SAMPLER = Sampler(Sampling(temperature=1.0, seed=1))


def feed(engine: Engine, ids: Sequence[int], turn: int = 0, **options: Any) -> list[Record]:
    place = Place(turn, turn // 2)
    return list(engine.feed(ids, [Role.USER] * len(ids), place, **options))


def generate(engine: Engine, count: int, turn: int = 1, **options: Any) -> list[Record]:
    sampler: Sampler = options.pop("sampler", SAMPLER)
    options = {"stop_ids": frozenset(), "max_new_tokens": count, **options}
    return list(engine.generate(sampler, Place(turn, turn // 2), **options))


def some_ids(count: int, seed: float = 0, vocab: int = 128) -> list[int]:
    return random.Random(seed).choices(range(3, vocab), k=count)


def evicted(records: list[Record]) -> list[list[int]]:
    return [record.positions.tolist() for record in records if isinstance(record, Evicted)]


def check_whole(engine: Engine) -> None:
    """Cache and ledger say the same, within the budget."""
    held = engine.ledger.held_positions
    assert engine.resident == engine.cache.length == engine.ledger.held_count == len(held)
    assert engine.resident <= engine.budget
    assert (np.diff(held) > 0).all()
    ids = engine.ledger.column("token_id")[held].tolist()
    for layer in range(len(engine.cache.layers) if len(held) else 0):
        for view in (engine.cache.layer_keys, engine.cache.layer_values):
            assert view(layer)[0, 0, :, 0].tolist() == ids


# The budget.

lengths = st.integers(1, 90)
settings_ = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(BOUNDED).map(lambda name: policy_class(name)()),
        "budget": st.integers(16, 70),
        "sinks": st.integers(0, 8),
        "decay": st.floats(0.01, 1),
        "protect": st.booleans(),
        "evict": st.sampled_from(["room", "turn"]),
        "archive": st.sampled_from([0, 1, 10**6]),
    }
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), lengths),
        st.tuples(st.just("pin"), st.integers(1, 20)),
        st.tuples(st.just("open"), lengths),
        st.tuples(st.just("generate"), lengths),
        st.tuples(st.just("close"), st.none()),
        st.tuples(st.just("switch"), settings_),
        st.tuples(st.just("full"), st.none()),
        st.tuples(st.just("fail"), lengths),
        st.tuples(st.just("mark"), st.none()),
        st.tuples(st.just("undo"), st.none()),
    ),
    max_size=18,
)


@given(settings_, steps)
@settings(max_examples=150)
def test_no_conversation_ever_exceeds_its_budget(
    first: dict[str, Any], plan: list[tuple[str, Any]]
) -> None:
    model = BigramModel()
    engine = Engine(model, Memory(**first))
    round_number = 0
    marks: list[tuple[Checkpoint, tuple[Any, ...]]] = []
    for step, what in plan:
        if step == "mark":
            marks.append((engine.mark(), whole_of(engine)))
            continue
        if step == "undo" and marks:
            undo(engine, *marks.pop())
            continue
        if step == "close":
            engine.close_round()
            round_number += 1
            continue
        for record in records_of(engine, model, step, what, Place(0, round_number)):
            check_whole(engine)
            if isinstance(record, Evicted):
                check_protected(engine, record, round_number)
        check_whole(engine)


def records_of(
    engine: Engine, model: BigramModel, step: str, what: Any, place: Place
) -> Iterator[Record]:
    """One step of a conversation; what can't be done changes nothing."""
    before = state_of(engine)
    ids = some_ids(what, engine.ledger.seen, model.vocab_size) if isinstance(what, int) else []
    roles = [Role.USER] * len(ids)
    try:
        if step == "feed":
            yield from engine.feed(ids, roles, place)
        elif step == "pin":
            engine.check_pins(len(ids))
            yield from engine.feed(ids, roles, place, pinned=True)
        elif step == "open":
            yield from engine.open_turn(len(ids), 20, place)
        elif step == "generate" and engine.logits is not None:
            yield from engine.generate(
                SAMPLER, place, stop_ids=frozenset([7]), max_new_tokens=what, reserve=3
            )
        elif step == "switch":
            yield from engine.switch(Memory(**what))
        elif step == "full":
            yield from engine.switch(replace(engine.memory, policy=Full()))
        elif step == "fail":
            with failing(model, layer=what % model.layers), pytest.raises(ZeroDivisionError):
                list(engine.feed(ids[:1], roles[:1], place))
    except (SettingError, ContextFullError):
        assert step == "generate" or state_of(engine) == before


def undo(engine: Engine, to: Checkpoint, then: tuple[Any, ...]) -> None:
    """Go back to a mark, or find that something is gone and change nothing."""
    before = whole_of(engine)
    try:
        engine.undo(to)
    except LookupError:
        assert whole_of(engine) == before
        return
    check_whole(engine)
    if len(to.mark.held) <= engine.budget:
        assert whole_of(engine) == then


def check_protected(engine: Engine, record: Evicted, round_number: int) -> None:
    """Neither sinks, nor pins, nor the newest E/2 rows of this round have left."""
    ledger, memory, policy = engine.ledger, engine.memory, engine.memory.policy
    assert (record.resident, record.seen) == (engine.resident, ledger.seen)
    sinks = memory.sinks if policy.honours_sinks else 0
    held = ledger.held_positions.tolist()
    is_pinned = (ledger.column("flags") & Flag.PINNED).astype(bool)
    pins = sum(is_pinned[p] and p >= sinks for p in held) if policy.honours_pins else 0
    room = max(8, memory.budget - sinks - pins)
    for position in record.positions.tolist():
        assert position >= sinks
        assert not (policy.honours_pins and is_pinned[position])
        current = ledger.column("round")[position] == round_number
        newest = position >= ledger.seen - room // 2
        assert not (memory.protect and current and newest)


def state_of(engine: Engine) -> tuple[Any, ...]:
    ledger = engine.ledger
    return ledger.seen, ledger.held_positions.tolist(), engine.memory, id(engine.logits)


def whole_of(engine: Engine) -> tuple[Any, ...]:
    """All that a mark brings back."""
    ledger = engine.ledger
    columns = ("token_id", "turn", "round", "birth_decay", "arrival_key", "role")
    values = [ledger.column(name).tolist() for name in columns]
    logits = None if engine.logits is None else engine.logits.tolist()
    held = ledger.held_positions.tolist()
    return ledger.seen, held, ledger.log_decay, values, logits


@dataclass
class failing:
    """Within, the model raises when this layer writes."""

    model: BigramModel
    layer: int

    def __enter__(self) -> None:
        def fail(layer: int, ids: Sequence[int]) -> None:
            if layer == self.layer:
                raise ZeroDivisionError

        self.model.before_layer = fail  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.model.before_layer


def test_chunks_are_a_quarter_of_the_room_and_each_finds_its_place() -> None:
    model = BigramModel()
    engine = Engine(model, Memory(Entropy(), budget=68, sinks=4))  # E = 64
    records = feed(engine, some_ids(100))
    assert [len(ids) for ids in model.passes] == [16] * 6 + [4]
    assert [len(gone) for gone in evicted(records)] == [64 + 16 - 68, 16, 4]
    assert [r.done for r in records if isinstance(r, Read)] == [16, 32, 48, 64, 80, 96, 100]


def test_while_generating_room_is_made_in_blocks_only_when_full() -> None:
    engine = Engine(BigramModel(), Memory(Entropy(), budget=160))
    feed(engine, some_ids(150))
    records = generate(engine, 30)
    kinds = "".join(type(record).__name__[0] for record in records)
    assert kinds == "G" * 10 + ("E" + "G" * 10) * 2 + "S"
    assert [len(gone) for gone in evicted(records)] == [10, 10]


def test_a_reply_protects_the_newest_of_its_own_round() -> None:
    """Policy interval, left alone, drops every second row."""
    engine = Engine(BigramModel(), Memory(policy_class("interval")(), budget=32, sinks=0))
    feed(engine, some_ids(10), turn=0)
    generate(engine, 40, turn=3)
    assert set(engine.ledger.held_positions.tolist()) >= set(range(50 - 16, 50))


def test_pins_stay_and_take_from_the_room_of_the_others() -> None:
    model = BigramModel()
    engine = Engine(model, Memory(Sink(), budget=48, sinks=4))
    feed(engine, some_ids(20), pinned=True)
    model.passes.clear()
    feed(engine, some_ids(400), turn=2)
    assert engine.ledger.held_positions[:20].tolist() == list(range(20))
    assert {len(ids) for ids in model.passes} == {(48 - 20) // 4, 400 % 7}


def test_more_pins_than_half_the_budget_are_refused() -> None:
    engine = Engine(BigramModel(), Memory(Sink(), budget=48, sinks=4))
    engine.check_pins(4 + 24)  # the first four are sinks anyway
    feed(engine, some_ids(10))
    engine.check_pins(24)
    with pytest.raises(SettingError, match="25 tokens are to be pinned, but budget 48 allows 24"):
        engine.check_pins(25)


@dataclass(frozen=True)
class Careless(Policy):
    """Keeps these rows whatever is asked."""

    rows: tuple[int, ...]

    def keep(self, rows: Held, num_keep: int) -> Tensor:
        return torch.tensor(self.rows)


@pytest.mark.parametrize(
    "rows",
    [range(11), range(13), range(9, 21), range(11, -1, -1), [*range(11), 10], [-1, *range(11)]],
)
def test_a_policy_that_keeps_the_wrong_rows_is_stopped_before_anything_is_lost(
    rows: Sequence[int],
) -> None:
    engine = Engine(BigramModel(), Memory(Careless(tuple(rows)), budget=64, protect=False))
    feed(engine, some_ids(20))
    before = state_of(engine)
    with pytest.raises(SettingError, match="Careless"):
        list(engine.switch(replace(engine.memory, budget=12)))
    assert state_of(engine) == before
    list(engine.switch(Memory(Careless(tuple(range(12))), budget=12, protect=False)))
    assert engine.ledger.held_positions.tolist() == list(range(12))


def test_a_switch_that_leaves_no_room_for_the_pins_changes_nothing() -> None:
    engine = Engine(BigramModel(), Memory(Sink(), budget=64))
    feed(engine, some_ids(30), pinned=True)
    before = state_of(engine)
    with pytest.raises(SettingError):
        list(engine.switch(replace(engine.memory, budget=40)))
    assert state_of(engine) == before


def test_a_smaller_budget_takes_effect_at_once_by_the_new_policy() -> None:
    engine = Engine(BigramModel(), Memory(Entropy(), budget=64, sinks=2))
    feed(engine, some_ids(60))
    engine.close_round()
    feed(engine, some_ids(1), turn=2)
    gone = evicted(list(engine.switch(Memory(Sink(), budget=20, sinks=2))))
    assert gone == [list(range(2, 61 - 18))]
    check_whole(engine)


def test_a_larger_budget_is_used() -> None:
    engine = Engine(BigramModel(), Memory(Entropy(), budget=32))
    feed(engine, some_ids(60))
    assert not list(engine.switch(replace(engine.memory, budget=200)))
    assert not evicted(feed(engine, some_ids(200 - engine.resident)))
    assert engine.resident == 200
    check_whole(engine)


def test_full_forgets_nothing_and_grows_past_its_first_buffers() -> None:
    engine = Engine(BigramModel(context_length=2500), Memory(Full(), budget=32))
    feed(engine, some_ids(2400))
    generate(engine, 100)
    assert engine.resident == engine.ledger.seen == 2500
    check_whole(engine)


def test_full_refuses_what_does_not_fit_before_reading_any_of_it() -> None:
    engine = Engine(BigramModel(context_length=300), Memory(Full(), budget=32))
    feed(engine, some_ids(100))
    before = state_of(engine)
    with pytest.raises(ContextFullError):
        feed(engine, some_ids(201))
    assert state_of(engine) == before
    feed(engine, some_ids(200))
    check_whole(engine)


def test_a_reply_under_full_stops_while_its_turn_can_still_be_closed() -> None:
    engine = Engine(BigramModel(context_length=300), Memory(Full(), budget=32))
    feed(engine, some_ids(290))
    with pytest.raises(ContextFullError):
        generate(engine, 20, reserve=4)
    assert engine.resident == 296
    feed(engine, some_ids(4))
    check_whole(engine)


@pytest.mark.parametrize("layer", range(BigramModel.layers))
def test_a_failed_pass_leaves_no_trace(layer: int) -> None:
    model, spared = BigramModel(), BigramModel()
    engine, other = (Engine(m, Memory(Entropy(), budget=64)) for m in (model, spared))
    for e in (engine, other):
        feed(e, some_ids(40))
    before = state_of(engine)
    with failing(model, layer), pytest.raises(ZeroDivisionError):
        feed(engine, some_ids(10, seed=9), turn=2)
    assert state_of(engine) == before
    check_whole(engine)
    for e in (engine, other):
        feed(e, some_ids(30, seed=2), turn=2)
    check_whole(engine)
    assert_same_conversation(engine, other)


@pytest.mark.parametrize("fits", [1, 2, 5, 11])
def test_out_of_memory_halves_the_pass_and_forgets_the_same(fits: int) -> None:
    small, large = BigramModel(), BigramModel()

    def out_of_memory(layer: int, ids: Sequence[int]) -> None:
        if len(ids) > fits and layer == 1:
            raise torch.OutOfMemoryError

    small.before_layer = out_of_memory  # type: ignore[method-assign]
    engine, other = (Engine(m, Memory(Entropy(), budget=64, sinks=0)) for m in (small, large))
    for turn in range(0, 8, 2):
        ids = some_ids(50, turn)
        assert evicted(feed(engine, ids, turn)) == evicted(feed(other, ids, turn))
        check_whole(engine)
    assert max(map(len, small.passes)) <= fits
    assert_same_conversation(engine, other)


def test_out_of_memory_with_a_single_token_is_an_error() -> None:
    model = BigramModel()

    def out_of_memory(layer: int, ids: Sequence[int]) -> None:
        raise torch.OutOfMemoryError

    model.before_layer = out_of_memory  # type: ignore[method-assign]
    engine = Engine(model, Memory(Entropy(), budget=64))
    with pytest.raises(torch.OutOfMemoryError):
        feed(engine, some_ids(20))
    assert engine.ledger.seen == engine.resident == 0


def assert_same_conversation(engine: Engine, other: Engine) -> None:
    assert engine.ledger.held_positions.tolist() == other.ledger.held_positions.tolist()
    for name in ("token_id", "round", "arrival_key", "state"):
        assert engine.ledger.column(name).tolist() == other.ledger.column(name).tolist()
    mine, theirs = (e.ledger.column("surprisal").tolist() for e in (engine, other))
    assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    assert engine.logits is not None
    assert other.logits is not None
    assert torch.equal(engine.logits, other.logits)


def test_turn_mode_forgets_only_when_a_turn_opens_and_then_for_its_reply_too() -> None:
    memory = Memory(Entropy(recent=0), budget=100, protect=False, evict="turn")
    engine, reply = Engine(BigramModel(), memory), 20
    for turn in range(0, 20, 2):
        ids = some_ids(30, turn)
        fits = engine.resident + len(ids) + reply <= memory.budget
        gone = evicted(list(engine.open_turn(len(ids), reply, Place(turn, turn // 2))))
        assert len(gone) == (0 if fits else 1)
        if gone:
            assert engine.resident == memory.budget - len(ids) - reply
        assert not evicted(feed(engine, ids, turn) + generate(engine, reply, turn + 1))
        engine.close_round()
        check_whole(engine)
    assert engine.resident == memory.budget


def test_otherwise_nothing_is_forgotten_when_a_turn_opens() -> None:
    engine = Engine(BigramModel(), Memory(Entropy(), budget=40))
    feed(engine, some_ids(40))
    assert not list(engine.open_turn(10, 20, Place(2, 1)))
    assert engine.resident == 40


def test_turn_mode_still_keeps_the_budget_when_a_turn_is_too_long() -> None:
    memory = Memory(Entropy(recent=0), budget=40, protect=False, evict="turn")
    engine = Engine(BigramModel(), memory)
    list(engine.open_turn(100, 20, Place(0, 0)))
    assert evicted(feed(engine, some_ids(100)))
    check_whole(engine)


# Generation.


def test_generation_ends_at_a_stop_id_which_is_not_read() -> None:
    probe = Engine(BigramModel(), Memory(Entropy(), budget=64))
    feed(probe, [5])
    drawn = [record.id for record in generate(probe, 10) if isinstance(record, Generated)]
    engine = Engine(BigramModel(), Memory(Entropy(), budget=64))
    feed(engine, [5])
    records = generate(engine, 10, stop_ids=frozenset([drawn[4]]))
    until = drawn.index(drawn[4])
    assert [r.id for r in records if isinstance(r, Generated)] == drawn[:until]
    assert records[-1] == Stopped("stop")
    assert engine.ledger.column("token_id").tolist() == [5, *drawn[:until]]


def test_generation_ends_at_its_length_or_when_interrupted() -> None:
    engine = Engine(BigramModel(), Memory(Entropy(), budget=64))
    feed(engine, [5])
    assert generate(engine, 3)[-1] == Stopped("length")
    assert generate(engine, 0) == [Stopped("length")]
    asked = iter([False, False, True])
    records = generate(engine, 9, interrupted=lambda: next(asked))
    assert [type(record) for record in records] == [Generated, Generated, Stopped]
    assert records[-1] == Stopped("interrupt")


def test_the_same_seed_tells_the_same_conversation() -> None:
    def conversation(seed: int) -> list[int]:
        engine = Engine(BigramModel(), Memory(policy_class("random")(), budget=40), seed=seed)
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        for turn in range(0, 6, 2):
            feed(engine, some_ids(25, turn), turn)
            generate(engine, 15, turn + 1, sampler=sampler)
        ids: list[int] = engine.ledger.column("token_id").tolist()
        return [*ids, *engine.ledger.held_positions.tolist()]

    assert conversation(1) == conversation(1) != conversation(2)


# Surprisal.


@pytest.mark.parametrize("rows_per_pass", [1, 7, 10**6])
def test_nothing_forgotten_every_surprisal_is_that_of_one_long_read(rows_per_pass: int) -> None:
    model = loaded("llama")
    engine = Engine(model, Memory(Entropy(), budget=256))
    engine._reader._rows_per_pass = rows_per_pass
    shown: list[float] = []
    for turn in (0, 2):
        feed(engine, some_ids(45, turn), turn)
        records = generate(engine, 15, turn + 1)
        shown += [record.surprisal for record in records if isinstance(record, Generated)]
        engine.close_round()
    ids = torch.from_numpy(engine.ledger.column("token_id")).long()
    with torch.inference_mode():
        logits = model.module(ids[None], use_cache=False).logits[0]
    expected = -logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    got = engine.ledger.column("surprisal")
    assert np.isnan(got[0])
    np.testing.assert_allclose(got[1:], expected, atol=1e-4)
    assert shown == [*got[45:60].tolist(), *got[105:120].tolist()]


@given(st.lists(st.integers(1, 120), min_size=1, max_size=5), st.integers(16, 80))
@settings(max_examples=30)
def test_evictions_do_not_touch_the_surprisal_of_the_next_token(
    turns: list[int], budget: int
) -> None:
    """In a bigram model the surprisal of a token is known, whatever is held."""
    model = BigramModel()
    engine = Engine(model, Memory(Entropy(), budget))
    for turn, count in enumerate(turns):
        feed(engine, some_ids(count, turn, model.vocab_size), 2 * turn)
        generate(engine, 10, 2 * turn + 1)
    ids = engine.ledger.column("token_id").tolist()
    expected = [-float(model.table[a].log_softmax(-1)[b]) for a, b in pairwise(ids)]
    assert engine.ledger.column("surprisal")[1:].tolist() == pytest.approx(expected, abs=1e-4)


def test_with_evictions_a_model_sees_what_is_held_and_nothing_else() -> None:
    """An oracle over transformers' own cache and rotation reads the same conversation."""
    model = loaded("llama")
    engine, oracle = Engine(model, Memory(Entropy(), budget=48)), Oracle(model)
    for turn in range(0, 8, 2):
        oracle.follow(feed(engine, some_ids(40, turn), turn), engine)
        oracle.follow(generate(engine, 20, turn + 1), engine)
        engine.close_round()
    assert oracle.evictions > 10
    np.testing.assert_allclose(
        engine.ledger.column("surprisal")[1:], oracle.surprisals[1:], atol=1e-4
    )


class Oracle:
    """A conversation with keys and values in plain lists, moved by the model's own rotation."""

    def __init__(self, model: LoadedModel) -> None:
        self.module = model.module
        self.held: list[int] = []  # stream positions
        self.rows: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []  # written at, per layer
        self.logits: Tensor | None = None
        self.surprisals: list[float] = []
        self.evictions = 0

    def follow(self, records: list[Record], engine: Engine) -> None:
        stream: list[int] = engine.ledger.column("token_id").tolist()
        for record in records:
            if isinstance(record, Evicted):
                gone = set(record.positions.tolist())
                stays = [i for i, position in enumerate(self.held) if position not in gone]
                self.held = [self.held[i] for i in stays]
                self.rows = [self.rows[i] for i in stays]
                self.evictions += 1
            elif isinstance(record, Generated):
                self.read(stream[record.position : record.position + 1])
            elif isinstance(record, Read):
                fed = record.total - record.done
                self.read(stream[len(self.surprisals) : len(stream) - fed])

    @torch.inference_mode()
    def read(self, ids: list[int]) -> None:
        cache, start = self.cache(), len(self.rows)
        output = self.module(torch.tensor([ids]), past_key_values=cache)
        for i, token in enumerate(ids):
            before = output.logits[0, i - 1] if i else self.logits
            nats = math.nan if before is None else -float(before.log_softmax(-1)[token])
            self.held.append(len(self.surprisals))
            self.surprisals.append(nats)
            at = slice(start + i, start + i + 1)
            layers = [(layer.keys[:, :, at], layer.values[:, :, at]) for layer in cache.layers]
            self.rows.append((start + i, layers))
        self.logits = output.logits[0, -1]

    def cache(self) -> DynamicCache:
        """The held rows at positions 0..n-1, each turned once from where it was written."""
        cache = DynamicCache(config=self.module.config)
        if not self.rows:
            return cache
        moves = torch.tensor([[slot - then for slot, (then, _) in enumerate(self.rows)]])
        cos, sin = self.module.model.rotary_emb(self.rows[0][1][0][0], moves)
        for layer in range(len(self.rows[0][1])):
            keys = torch.cat([layers[layer][0] for _, layers in self.rows], 2)
            values = torch.cat([layers[layer][1] for _, layers in self.rows], 2)
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[0], values, layer)
        return cache


@pytest.mark.parametrize("rows_per_pass", [1, 2, 10**6])
@pytest.mark.parametrize("count", [1, 2, 9, 200])
def test_the_first_token_ranks_as_its_chunks_maximum(rows_per_pass: int, count: int) -> None:
    model = BigramModel()
    engine = Engine(model, Memory(Entropy(), budget=64, sinks=0))  # chunks of 16
    engine._reader._rows_per_pass = rows_per_pass
    feed(engine, some_ids(count))
    nats = engine.ledger.column("surprisal")
    assert np.isnan(nats[0])
    expected = max(nats[1:16].tolist(), default=math.log(model.vocab_size))
    assert engine.ledger.surprisal_of(np.array([0])).tolist() == [expected]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=20)
def test_the_anchor_flag_marks_what_ends_a_sentence(ids: list[int]) -> None:
    engine = Engine(BigramModel(), Memory(Sink(), budget=64), ends_sequence=lambda i: i % 3 == 0)
    feed(engine, ids)
    flags = engine.ledger.column("flags")
    assert [bool(flag & Flag.ANCHOR) for flag in flags] == [i % 3 == 0 for i in ids]


@pytest.mark.gpu
def test_on_a_gpu_the_budget_holds_and_the_draws_are_those_of_the_cpu() -> None:
    module = build(*HELD["llama"], torch.bfloat16)
    there = wrap_model("llama", module.to("cuda"), None)
    engines = [
        Engine(model, Memory(policy_class("reservoir")(), budget=64), seed=5)
        for model in (there, loaded("llama"))
    ]
    for engine in engines:
        for turn in range(0, 6, 2):
            for record in [*feed(engine, some_ids(70, turn), turn), *generate(engine, 40)]:
                if isinstance(record, Evicted):
                    assert record.resident <= 64
            assert engine.resident <= 64
            engine.close_round()
    gpu, cpu = (engine.ledger for engine in engines)
    assert gpu.column("arrival_key").tolist() == cpu.column("arrival_key").tolist()
    assert gpu.held_positions.tolist() == cpu.held_positions.tolist()
    assert np.isfinite(gpu.column("surprisal")[1:]).all()
