"""Attention received: the tracked sums equal those of the weights that eager attention returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attacking import MANY
from chatting import session
from families import HELD, TELLING, loaded
from sirchat.chat.settings import check_policy
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.errors import SettingError
from sirchat.memory.attention import AttentionStats, AttentionStatsConfig, PassAttention
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.by_attention import H2o, Snapkv
from sirchat.memory.policies.by_position import Sink
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.attention_hook import CallCounter, observed_by
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import PassResult


@dataclass(frozen=True)
class Eager(LoadedModel):
    """Before each pass, runs the same ids on a copy of the cache, and keeps the attention weights.

    Each entry of `passes` is a list of weights [H, m, n], one per layer.
    """

    def forward(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        usual = self.module.config._attn_implementation
        self.module.set_attn_implementation("eager")
        at = how.get("positions")
        with torch.inference_mode():
            output = self.module(
                input_ids=torch.tensor([ids]),
                position_ids=None if at is None else torch.tensor([list(at)]),
                past_key_values=deepcopy(cache),
                use_cache=True,
                output_attentions=True,
            )
        self.module.set_attn_implementation(usual)
        self.passes.append([layer[0] for layer in output.attentions])
        return super().forward(ids, cache, **how)

    def read(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        return PassResult.of_logits(self.forward(ids, cache, **how), ids)

    @property
    def passes(self) -> list[list[Tensor]]:
        passes: list[list[Tensor]] = self.__dict__.setdefault("_passes", [])
        return passes


class Sums:
    """The attention that every row received, computed in plain Python."""

    def __init__(self, layers: Sequence[int], window: int) -> None:
        self.total: dict[int, float] = {}
        self.passes: list[tuple[list[int], Tensor]] = []
        self.layers, self.window = layers, window

    def add(self, positions: list[int], weights: list[Tensor]) -> None:
        mean = torch.stack([weights[layer].double().mean(0) for layer in self.layers]).mean(0)
        for row, position in enumerate(positions):
            got = float(mean[:, row].sum())
            self.total[position] = self.total.get(position, 0.0) + got
        self.passes += [(positions, query) for query in mean]

    def decay(self, factor: float) -> None:
        self.total = {position: factor * total for position, total in self.total.items()}

    def recent_attention(self, position: int) -> float:
        newest = self.passes[-self.window :] if self.window else []
        return sum(float(row[at.index(position)]) for at, row in newest if position in at)


def talk(family: str, policy: Policy, decay: float = 0.8, **more: Any) -> tuple[Engine, Sums]:
    """Two rounds read and answered under a budget, and the expected sums."""
    own = loaded(family)
    model = Eager(**{field.name: getattr(own, field.name) for field in fields(own)})
    settings = CacheSettings(policy=policy, budget=32, decay=decay, archive=2**20, **more)
    engine = Engine(model, settings, seed=3)
    assert policy.attention_stats is not None
    sums = Sums(
        policy.attention_stats.recorded_layers(len(model.rotations)), policy.attention_stats.window
    )
    generator = torch.Generator().manual_seed(5)
    sampler = Sampler(Sampling(temperature=1.0))

    for number in range(2):
        ids = torch.randint(3, 128, (17,), generator=generator).tolist()
        records = chain(
            engine.prefill(ids, [Role.USER] * len(ids), TurnRef(2 * number, number)),
            Generation(
                engine,
                sampler,
                TurnRef(2 * number + 1, number),
                stop_ids=frozenset(),
                max_new_tokens=9,
            ),
        )
        for _ in records:
            for weights in model.passes:  # of the pass that this record reports
                sums.add(engine.ledger.held_positions.tolist(), weights)
            model.passes.clear()
        engine.decay_at_round_end()
        sums.decay(decay)
    return engine, sums


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*HELD} - {"falcon"}) if MANY else TELLING)
def test_tracked_attention_is_that_of_an_eager_model(family: str) -> None:
    engine, sums = talk(family, Snapkv(recent=8, layers=0, window=20))
    ledger = engine.ledger
    assert ledger.held_count < ledger.seen == len(sums.total)
    everything = np.arange(ledger.seen)
    counted = ledger.attention.totals(everything, ledger.log_decay)
    wanted = np.array([sums.total[position] for position in everything.tolist()])
    assert counted == pytest.approx(wanted, abs=1e-4)
    held = ledger.held_positions
    recent_attention = [sums.recent_attention(position) for position in held.tolist()]
    recent = ledger.attention.recent(held)[0, 0]
    assert recent == pytest.approx(np.array(recent_attention), abs=1e-4)
    assert wanted.std() > 0.1


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        (0, {"absolute_positions": True}),
        (0, {"evict": "before-turn"}),
        (2, {}),
    ],
)
def test_tracked_attention_is_right_however_rows_are_held(
    layers: int, more: dict[str, Any]
) -> None:
    engine, sums = talk("llama", H2o(recent=8, layers=layers), **more)
    assert sums.layers == ([1, 3] if layers else [0, 1, 2, 3])
    ledger = engine.ledger
    assert ledger.held_count < ledger.seen
    counted = ledger.attention.totals(np.arange(ledger.seen), ledger.log_decay)
    wanted = [sums.total[position] for position in range(ledger.seen)]
    assert counted == pytest.approx(np.array(wanted), abs=1e-4)


@pytest.mark.parametrize(
    ("counted", "layers", "sliding", "expected"),
    [
        (0, 4, (), [0, 1, 2, 3]),
        (1, 4, (), [2]),
        (2, 4, (), [1, 3]),
        (9, 4, (), [0, 1, 2, 3]),
        (2, 6, (0, 1, 3, 4), [2, 5]),
        (2, 4, (0, 1, 2, 3), [1, 3]),
        (0, 3, (1,), [0, 1, 2]),
    ],
)
def test_counted_layers_are_evenly_spaced_among_those_without_a_window(
    counted: int, layers: int, sliding: tuple[int, ...], expected: list[int]
) -> None:
    assert AttentionStatsConfig(counted).recorded_layers(layers, sliding) == expected


@pytest.mark.parametrize("at_a_time", [1, 7])
def test_a_long_text_is_read_in_parts_whose_attention_fits_in_memory(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loaded("llama")
    whole, parts = (Engine(own, memory(Sink(), budget=96)) for _ in range(2))
    for engine, fits in ((whole, 96), (parts, at_a_time)):
        list(prefill(engine, 30, 0))  # before tracking begins
        engine.switcher.switch(memory(Snapkv(recent=8, window=6), budget=96))
        monkeypatch.setattr("sirchat.engine.reader.PASS_BYTES", fits * 4 * own.query_heads * 70)
        list(prefill(engine, 40, 1))
    for one, other in zip(received(parts), received(whole), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_policy_that_needs_no_attention_has_none_tracked() -> None:
    model = loaded("qwen3")
    engine = Engine(model, memory(Sink()))
    usual = model.module.config._attn_implementation
    list(prefill(engine, 40, 0))
    assert not engine.ledger.attention.has_records
    assert model.module.config._attn_implementation == usual


def test_tracking_does_not_change_the_logits() -> None:
    plain, counting = (
        Engine(loaded("gemma3"), memory(Sink())),
        Engine(loaded("gemma3"), replace(memory(Sink()), count_attention=True)),
    )
    for engine in (plain, counting):
        for number in range(4):
            list(prefill(engine, 23, number))
    assert plain.logits is not None
    assert counting.logits is not None
    assert torch.equal(plain.logits, counting.logits)
    assert counting.ledger.attention.has_records


def test_undo_restores_the_tracked_attention() -> None:
    engine = Engine(loaded("llama"), memory(Snapkv(recent=8, window=6)))
    for number in range(4):
        list(prefill(engine, 23, number))
    before, checkpoint = received(engine), engine.checkpoint()
    for number in range(4, 8):
        list(prefill(engine, 23, number))
    # archived rows come back, receive attention, and leave again
    archived = np.setdiff1d(np.arange(92), checkpoint.placement.held)[:5]
    engine.switcher.pin(archived, True)
    list(prefill(engine, 23, 8))
    engine.switcher.pin(archived, False)
    list(prefill(engine, 23, 9))
    assert not same(received(engine), before)
    engine.undo(checkpoint)
    assert same(received(engine), before)


def test_undo_to_before_tracking_began_leaves_no_attention() -> None:
    engine = Engine(loaded("llama"), memory(Sink()))
    list(prefill(engine, 30, 0))
    checkpoint = engine.checkpoint()
    engine.switcher.switch(memory(Snapkv(recent=8, window=6)))
    list(prefill(engine, 23, 1))
    engine.undo(checkpoint)
    assert not any(one.any() for one in received(engine))
    list(prefill(engine, 23, 1))
    assert received(engine)[0].any()


def test_rows_read_before_tracking_began_start_with_a_usual_sum() -> None:
    engine = Engine(loaded("llama"), memory(Sink(), budget=200))
    list(prefill(engine, 60, 0))
    engine.switcher.switch(memory(H2o(recent=8), budget=200))
    for number in (1, 2):
        list(prefill(engine, 20, number))
    counted, _ = received(engine)
    assert counted[:60].min() >= 0.5 * np.median(counted[60:80])


def test_erased_rows_lose_their_attention() -> None:
    engine = Engine(loaded("llama"), memory(Snapkv(recent=8, window=6)))
    list(prefill(engine, 23, 0))
    at = np.array([5, 6])
    engine.erase(at)
    assert not engine.ledger.attention.totals(at, 0).any()
    assert not engine.ledger.attention.recent(at).any()
    assert engine.ledger.attention.totals(np.array([4]), 0).all()


def test_a_row_that_is_held_again_goes_on_where_it_was() -> None:
    column = AttentionStats()
    column.add(np.array([0, 1]), [one_query(0.5, 0.5)], 0.0)
    column.add(np.array([1]), [one_query(1.0)], math.log(0.5))
    column.add(np.array([0, 1]), [one_query(0.25, 0.75)], math.log(0.25))
    assert column.totals(np.array([0, 1, 7]), math.log(0.25)) == pytest.approx(
        [0.25 * 0.5 + 0.25, 0.25 * 0.5 + 0.5 * 1 + 0.75, 0]
    )


def one_query(*weights: float) -> PassAttention:
    """The weights of one query."""
    return PassAttention.from_weights(np.array([weights], np.float32))


def test_undo_works_however_often_rows_come_back() -> None:
    column = AttentionStats()
    column.add(np.arange(4), [PassAttention.from_weights(np.eye(4, dtype=np.float32))], 0.0)
    before = column.checkpoint(np.array([0, 1]))
    for _ in range(300):
        column.note_restored(np.array([2, 3]))
        column.add(np.arange(4), [one_query(0.4, 0.3, 0.2, 0.1)], 0.0)
    column.undo(before, 4)
    assert column.totals(np.arange(4), 0.0).tolist() == [1, 1, 1, 1]


def test_two_recorders_observe_the_same_pass() -> None:
    model, inner, outer = loaded("llama"), CallCounter(), CallCounter()
    with observed_by(model.module, outer):
        model.forward([5, 6, 7], model.new_cache(8), observer=inner)
    model.forward([5, 6, 7], model.new_cache(8))
    for counter in (inner, outer):
        assert counter.calls == {0: 1, 1: 1, 2: 1, 3: 1}


def memory(policy: Policy, budget: int = 48) -> CacheSettings:
    return CacheSettings(policy=policy, budget=budget, decay=0.8, archive=2**20)


def prefill(engine: Engine, count: int, number: int) -> Iterator[object]:
    ids = torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(number)).tolist()
    yield from engine.prefill(ids, [Role.USER] * count, TurnRef(number, number))
    engine.decay_at_round_end()


def received(engine: Engine) -> list[np.ndarray]:
    """The tracked sums of all tokens."""
    ledger, everything = engine.ledger, np.arange(engine.ledger.seen)
    attention = ledger.attention
    return [attention.totals(everything, ledger.log_decay), attention.recent(everything)[0, 0]]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, one, other))


def test_a_model_without_attention_weights_is_refused_only_if_a_setting_needs_them() -> None:
    model = loaded("falcon")
    for changes, instead in (({"policy": "attention"}, "entropy"), ({"attention": "on"}, "auto")):
        with pytest.raises(SettingError, match="does not expose its attention") as error:
            check_policy(changed_profile(Profile(), "flag", **changes), model, "--policy")
        assert instead in str(error.value)
    check_policy(Profile(policy="entropy"), model, "--policy")
    engine = Engine(model, memory(Entropy(recent=8)))
    for number in range(4):
        list(prefill(engine, 23, number))
    assert engine.ledger.held_count <= 48
    assert not engine.ledger.attention.has_records


def test_attention_is_tracked_when_the_setting_is_on() -> None:
    chat = session(policy="sink", budget=64)
    list(chat.ask("My name is Anna."))
    assert {row.attention for row in chat.snapshot().rows} == {None}
    chat.switch("/set", attention="on")
    list(chat.ask("Tell me a joke."))
    assert all(row.attention is not None for row in chat.snapshot().rows)
