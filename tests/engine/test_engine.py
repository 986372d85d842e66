"""The engine: the budget is a hard bound, replies end in time, and failures leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from engine_steps import (
    SAMPLER,
    Record,
    check_whole,
    evicted,
    failing,
    generate,
    prefill,
    some_ids,
    state_of,
)
from families import HELD, BigramModel, build, loaded
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.extra_passes import score_continuations
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import (
    CacheSettings,
    GeneratedToken,
    ReadProgress,
    Stopped,
    TurnRef,
)
from sirchat.errors import ContextFullError, SettingError
from sirchat.memory.key_value_store import Checkpoint
from sirchat.memory.ledger import Flag, HeldRows, MovedRows, Role
from sirchat.memory.policies import policy_class, policy_names
from sirchat.memory.policies.anchor import Anchor
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.by_position import Full, Sink
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.model import wrap_model

BOUNDED = [name for name in policy_names() if policy_class(name).bounded]


lengths = st.integers(1, 90)
settings_ = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(BOUNDED).map(lambda name: policy_class(name)()),
        "budget": st.integers(16, 70),
        "sinks": st.integers(0, 8),
        "decay": st.floats(0.01, 1),
        "protect": st.booleans(),
        "evict": st.sampled_from(["when-full", "before-turn", "between-turns"]),
        "archive": st.sampled_from([0, 1, 10**6]),
    }
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), lengths),
        st.tuples(st.just("pin"), st.integers(1, 20)),
        st.tuples(st.just("open"), lengths),
        st.tuples(st.just("generate"), lengths),
        st.tuples(st.just("close"), st.none()),
        st.tuples(st.just("switch"), settings_),
        st.tuples(st.just("full"), st.none()),
        st.tuples(st.just("fail"), lengths),
        st.tuples(st.just("checkpoint"), st.none()),
        st.tuples(st.just("undo"), st.none()),
    ),
    max_size=18,
)


FIRST = {"policy": Entropy(), "budget": 64, "evict": "when-full"}


@given(settings_, steps)
@example(FIRST, [("prefill", 60), ("fail", 1), ("fail", 2), ("prefill", 90), ("fail", 3)])
@example(FIRST | {"policy": Anchor(), "budget": 32}, [("prefill", 90)] * 5)
def test_no_conversation_ever_exceeds_its_budget(
    first: dict[str, Any], plan: list[tuple[str, Any]]
) -> None:
    model = BigramModel()
    engine = Engine(model, CacheSettings(**first), ends_sequence=lambda token_id: token_id % 9 == 0)
    round_number = 0
    checkpoints: list[tuple[Checkpoint, tuple[Any, ...]]] = []
    for step, what in plan:
        if step == "checkpoint":
            checkpoints.append((engine.checkpoint(), whole_of(engine)))
            continue
        if step == "undo" and checkpoints:
            undo(engine, *checkpoints.pop())
            continue
        if step == "close":
            engine.decay_at_round_end()
            round_number += 1
            continue
        for record in records_of(engine, model, step, what, TurnRef(0, round_number)):
            check_whole(engine)
            if isinstance(record, MovedRows) and not record.restored:
                check_protected(engine, record, round_number)
        check_whole(engine)


def records_of(
    engine: Engine, model: BigramModel, step: str, what: Any, turn: TurnRef
) -> Iterator[Record]:
    """One step of a conversation; a step that is refused changes nothing."""
    before = state_of(engine)
    ids = some_ids(what, engine.ledger.seen, model.vocab_size) if isinstance(what, int) else []
    roles = [Role.USER] * len(ids)
    try:
        if step == "prefill":
            yield from engine.prefill(ids, roles, turn)
        elif step == "pin":
            engine.choice.check_pins(len(ids))
            yield from engine.prefill(ids, roles, turn, pinned=True)
        elif step == "open":
            yield from engine.evictor.make_room_for_turn(len(ids), 20, turn)
        elif step == "generate" and engine.logits is not None:
            yield from Generation(
                engine,
                SAMPLER,
                turn,
                stop_ids=frozenset([7]),
                max_new_tokens=what,
                closing_tokens=3,
            )
        elif step == "switch":
            yield from engine.switcher.switch(CacheSettings(**what))
        elif step == "full":
            yield from engine.switcher.switch(replace(engine.settings, policy=Full()))
        elif step == "fail":
            whole = whole_of(engine)
            with failing(model, layer=what % model.layers), pytest.raises(ZeroDivisionError):
                list(engine.prefill(ids[:1], roles[:1], turn))
            now = whole_of(engine)
            assert (now[0], *now[2:]) == (whole[0], *whole[2:])
            assert set(now[1]) <= set(whole[1])  # room was made
    except (SettingError, ContextFullError):
        assert step == "generate" or state_of(engine) == before


def undo(engine: Engine, to: Checkpoint, then: tuple[Any, ...]) -> None:
    """Go back to a checkpoint, or find that rows are lost and change nothing."""
    before = whole_of(engine)
    try:
        engine.undo(to)
        engine.switcher.choose_unless_valid()
    except LookupError:
        assert whole_of(engine) == before
        return
    check_whole(engine)
    if len(to.placement.held) <= engine.budget:
        assert whole_of(engine) == then


def check_protected(engine: Engine, record: MovedRows, round_number: int) -> None:
    """Neither sinks, nor pins, nor the newest E/2 rows of this round have left."""
    ledger, memory, policy = engine.ledger, engine.settings, engine.settings.policy
    read = ledger.seen - record.seen  # a step tells of what it evicted once it has read its token
    assert (engine.resident - record.resident, read) in ((0, 0), (1, 1))
    sinks = memory.sinks if policy.honours_sinks else 0
    held = ledger.held_positions.tolist()
    is_pinned = (ledger.column("flags") & Flag.PINNED).astype(bool)
    pins = sum(is_pinned[p] and p >= sinks for p in held) if policy.honours_pins else 0
    room = max(8, memory.budget - sinks - pins)
    for position in record.positions.tolist():
        assert position >= sinks
        assert not (policy.honours_pins and is_pinned[position])
        current = ledger.column("round")[position] == round_number
        newest = position >= record.seen - room // 2
        is_protected = memory.protect and current and newest
        assert not is_protected or policy.compacts_at_anchors  # which evicts what an anchor stores


def whole_of(engine: Engine) -> tuple[Any, ...]:
    """All that a checkpoint restores."""
    ledger = engine.ledger
    columns = ("token_id", "turn", "round", "birth_decay", "arrival_key", "role")
    values = [ledger.column(name).tolist() for name in columns]
    logits = None if engine.logits is None else engine.logits.tolist()
    held = ledger.held_positions.tolist()
    return ledger.seen, held, ledger.log_decay, values, logits


def test_chunks_are_a_quarter_of_the_room_and_those_that_find_room_are_read_at_once() -> None:
    model = BigramModel()
    engine = Engine(model, CacheSettings(Entropy(), budget=68, sinks=4))  # E = 64
    records = prefill(engine, some_ids(100))
    assert [len(ids) for ids in model.passes] == [4 * 16, 16, 16, 4]
    assert [len(gone) for gone in evicted(records)] == [64 + 16 - 68, 16, 4]
    assert [r.done for r in records if isinstance(r, ReadProgress)] == [64, 80, 96, 100]


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_names())
def test_what_is_evicted_does_not_depend_on_how_many_chunks_are_read_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_some_turns() -> tuple[Any, ...]:
        settings = CacheSettings(policy_class(name)(), budget=48, sinks=2)
        engine, gone = Engine(loaded("llama"), settings), []
        for turn, count in enumerate((30, 5, 17, 40, 1, 60)):
            gone += evicted(prefill(engine, some_ids(count), turn=turn))
            engine.decay_at_round_end()
        return gone, engine.ledger.held_positions.tolist()

    at_once = after_some_turns()
    monkeypatch.setattr("sirchat.engine.engine._MAX_CHUNKED_IDS", 1)
    assert after_some_turns() == at_once


@pytest.mark.parametrize("pinned", [False, True])
def test_a_gpu_reads_what_fits_in_as_few_passes_as_its_memory_allows(pinned: bool) -> None:
    gone = []
    for is_on_gpu in (False, True):
        model = BigramModel()
        engine = Engine(model, CacheSettings(Entropy(), budget=228, sinks=4))  # E = 224
        engine.reader.is_on_gpu, engine.reader.max_pass_ids = is_on_gpu, 100
        records = prefill(engine, some_ids(110), pinned=pinned)
        records += prefill(engine, some_ids(300), turn=2)
        gone.append(evicted(records))
        if is_on_gpu:  # not as many as a pass may have, and a rest
            assert [len(ids) for ids in model.passes[:2]] == [55, 55]
    assert gone[0] == gone[1] != []


def test_while_generating_room_is_made_in_blocks_only_when_full() -> None:
    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=160))
    prefill(engine, some_ids(150))
    records = generate(engine, 30)
    kinds = "".join(type(record).__name__[0] for record in records)
    assert kinds == "G" * 10 + ("M" + "G" * 10) * 2 + "S"
    assert [len(gone) for gone in evicted(records)] == [10, 10]


def test_pins_stay_and_take_from_the_room_of_the_others() -> None:
    model = BigramModel()
    engine = Engine(model, CacheSettings(Sink(), budget=48, sinks=4))
    prefill(engine, some_ids(20), pinned=True)
    model.passes.clear()
    prefill(engine, some_ids(400), turn=2)
    assert engine.ledger.held_positions[:20].tolist() == list(range(20))
    assert {len(ids) for ids in model.passes[1:]} == {(48 - 20) // 4, 400 % 7}


def test_more_pins_than_half_the_budget_are_refused() -> None:
    engine = Engine(BigramModel(), CacheSettings(Sink(), budget=48, sinks=4))
    engine.choice.check_pins(4 + 24)  # the first four are sinks anyway
    prefill(engine, some_ids(10))
    engine.choice.check_pins(24)
    with pytest.raises(
        SettingError, match="25 tokens would be pinned, but budget 48 allows only 24"
    ):
        engine.choice.check_pins(25)


@dataclass(frozen=True)
class Careless(Policy):
    """Keeps these rows whatever is asked."""

    rows: tuple[int, ...]

    def keep(self, rows: HeldRows, num_keep: int) -> Tensor:
        return torch.tensor(self.rows)


@pytest.mark.parametrize(
    "rows",
    [range(11), range(13), range(9, 21), range(11, -1, -1), [*range(11), 10], [-1, *range(11)]],
)
def test_a_policy_that_keeps_the_wrong_rows_is_stopped_before_anything_is_lost(
    rows: Sequence[int],
) -> None:
    engine = Engine(BigramModel(), CacheSettings(Careless(tuple(rows)), budget=64, protect=False))
    prefill(engine, some_ids(20))
    before = state_of(engine)
    with pytest.raises(SettingError, match="Careless"):
        engine.switcher.switch(replace(engine.settings, budget=12))
    assert state_of(engine) == before
    engine.switcher.switch(CacheSettings(Careless(tuple(range(12))), budget=12, protect=False))
    assert engine.ledger.held_positions.tolist() == list(range(12))


def test_full_evicts_nothing_and_grows_past_its_first_buffers() -> None:
    engine = Engine(BigramModel(context_length=2500), CacheSettings(Full(), budget=32))
    prefill(engine, some_ids(2400))
    generate(engine, 100)
    assert engine.resident == engine.ledger.seen == 2500
    check_whole(engine)


def test_turn_mode_evicts_only_when_a_turn_opens_and_then_for_its_reply_too() -> None:
    memory = CacheSettings(Entropy(recent=0), budget=100, protect=False, evict="before-turn")
    engine, reply = Engine(BigramModel(), memory), 20
    for turn in range(0, 20, 2):
        ids = some_ids(30, turn)
        fits = engine.resident + len(ids) + reply <= memory.budget
        gone = evicted(engine.evictor.make_room_for_turn(len(ids), reply, TurnRef(turn, turn // 2)))
        assert len(gone) == (0 if fits else 1)
        if gone:
            assert engine.resident == memory.budget - len(ids) - reply
        assert not evicted(prefill(engine, ids, turn) + generate(engine, reply, turn + 1))
        engine.decay_at_round_end()
        check_whole(engine)
    assert engine.resident == memory.budget


@pytest.mark.gpu
def test_on_a_gpu_the_budget_holds_and_the_draws_are_those_of_the_cpu() -> None:
    module = build(*HELD["llama"], torch.bfloat16)
    there = wrap_model("llama", module.to("cuda"), None)
    engines = [
        Engine(model, CacheSettings(policy_class("reservoir")(), budget=64), seed=5)
        for model in (there, loaded("llama"))
    ]
    for engine in engines:
        for turn in range(0, 6, 2):
            for record in [*prefill(engine, some_ids(70, turn), turn), *generate(engine, 40)]:
                if isinstance(record, MovedRows) and not record.restored:
                    assert record.resident <= 64
            assert engine.resident <= 64
            engine.decay_at_round_end()
    gpu, cpu = (engine.ledger for engine in engines)
    assert gpu.column("arrival_key").tolist() == cpu.column("arrival_key").tolist()
    assert gpu.held_positions.tolist() == cpu.held_positions.tolist()
    assert np.isfinite(gpu.column("surprisal")[1:]).all()


def test_generation_ends_at_a_stop_id_which_is_not_read() -> None:
    probe = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    prefill(probe, [5])
    drawn = [record.id for record in generate(probe, 10) if isinstance(record, GeneratedToken)]
    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    prefill(engine, [5])
    records = generate(engine, 10, stop_ids=frozenset([drawn[4]]))
    until = drawn.index(drawn[4])
    assert [r.id for r in records if isinstance(r, GeneratedToken)] == drawn[:until]
    assert records[-1] == Stopped("stop", drawn[4])
    assert engine.ledger.column("token_id").tolist() == [5, *drawn[:until]]


def test_generation_ends_at_its_length() -> None:
    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    prefill(engine, [5])
    assert generate(engine, 3)[-1] == Stopped("length")
    assert generate(engine, 0) == [Stopped("length")]
    assert [type(record) for record in generate(engine, 2)] == [*[GeneratedToken] * 2, Stopped]


def test_only_recent_words_count_as_said_before_and_never_the_templates() -> None:
    asked: list[list[int]] = []

    class Asking(Sampler):
        is_unconstrained = False

        def pick(
            self, logits: Tensor, recent_ids: Callable[[int], list[int]], position: int
        ) -> int:
            asked.extend(recent_ids(count) for count in (0, 2, 64))
            return 0

    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    roles = [Role.TEMPLATE, Role.USER, Role.USER, Role.TEMPLATE, Role.ASSISTANT, Role.TEMPLATE]
    list(engine.prefill([5, 6, 7, 8, 9, 10], roles, TurnRef(0, 0)))
    generate(engine, 1, sampler=Asking(Sampling()), stop_ids=frozenset([0]))
    assert asked == [[6, 7, 9], [7, 9], [6, 7, 9]]


@pytest.mark.parametrize("fits", [1, 2, 5, 11])
def test_out_of_memory_halves_the_pass_and_evicts_the_same(fits: int) -> None:
    small, large = BigramModel(), BigramModel()

    def out_of_memory(layer: int, ids: Sequence[int]) -> None:
        if len(ids) > fits and layer == 1:
            raise torch.OutOfMemoryError

    small.before_layer = out_of_memory  # type: ignore[method-assign]
    engine, other = (
        Engine(m, CacheSettings(Entropy(), budget=64, sinks=0)) for m in (small, large)
    )
    for turn in range(0, 8, 2):
        ids = some_ids(50, turn)
        assert evicted(prefill(engine, ids, turn)) == evicted(prefill(other, ids, turn))
        check_whole(engine)
    assert max(map(len, small.passes)) <= fits
    assert_same_conversation(engine, other)


def test_out_of_memory_with_a_single_token_is_an_error() -> None:
    model = BigramModel()

    def out_of_memory(layer: int, ids: Sequence[int]) -> None:
        raise torch.OutOfMemoryError

    model.before_layer = out_of_memory  # type: ignore[method-assign]
    engine = Engine(model, CacheSettings(Entropy(), budget=64))
    with pytest.raises(torch.OutOfMemoryError):
        prefill(engine, some_ids(20))
    assert engine.ledger.seen == engine.resident == 0


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_alternatives_are_scored_as_if_each_was_read_and_nothing_is_held(
    name: str, absolute: bool
) -> None:
    settings = CacheSettings(Sink(), budget=40, absolute_positions=absolute)
    engine = Engine(loaded(name), settings)
    prefill(engine, some_ids(60), 0)
    prefill(engine, some_ids(10, 1), 2)
    engine.erase(engine.ledger.held_positions[10:20])  # there is room for those that are read
    before, checkpoint = state_of(engine), engine.checkpoint()
    assert engine.logits is not None
    alternatives = [[int(engine.logits.argmax())], some_ids(4, 3), some_ids(3, 4)]
    scores = score_continuations(engine.reader, alternatives)
    assert state_of(engine) == before
    for ids, score in zip(alternatives, scores, strict=True):
        likeliest = []
        for token_id in ids:
            assert engine.logits is not None
            likeliest.append(int(engine.logits.argmax()))
            prefill(engine, [token_id], 4)
        nats = engine.ledger.column("surprisal")[-len(ids) :]
        assert score.ids == tuple(ids)
        assert score.greedy == (likeliest == ids)
        assert [-nat for nat in score.log_probabilities] == pytest.approx(nats, abs=1e-4)
        engine.undo(checkpoint)


def assert_same_conversation(engine: Engine, other: Engine) -> None:
    assert engine.ledger.held_positions.tolist() == other.ledger.held_positions.tolist()
    for name in ("token_id", "round", "arrival_key", "state"):
        assert engine.ledger.column(name).tolist() == other.ledger.column(name).tolist()
    mine, theirs = (e.ledger.column("surprisal").tolist() for e in (engine, other))
    assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    assert engine.logits is not None
    assert other.logits is not None
    assert torch.equal(engine.logits, other.logits)
