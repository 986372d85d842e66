"""A captured decode step, on the CPU: torch's kernels, and a stand-in for CUDA graphs."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captured import captured
from engine_steps import generate, prefill, some_ids
from families import build
from random_encoders import random_encoder
from simulated_devices import DEVICES, move, refuses_waits, simulated_devices
from sirchat.engine.engine import Engine
from sirchat.engine.reader import device_choice
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings
from sirchat.errors import ModelError
from sirchat.lab.bench.decode import with_decoder
from sirchat.memory.cache import BoundedCache
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.attention_hook import PassWeights
from sirchat.models.captured_step import CapturedStep, ChosenToken, DeviceRun, capture_first
from sirchat.models.llama_step import LlamaStep
from sirchat.models.model import LoadedModel, wrap_model

IDS = some_ids(7)


def small(kind: str = "llama", **options: Any) -> LoadedModel:
    model = wrap_model(kind, build(kind, {"num_hidden_layers": 2, **options}), None)
    return replace(model, encoder=random_encoder(model, (1, 2)))


def holding(model: LoadedModel, ids: list[int], capacity: int = 12) -> BoundedCache:
    """A cache that has read the ids."""
    cache = model.new_cache(capacity)
    model._module_logits(ids, cache)
    cache.commit(len(ids))
    return cache


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_step_reads_as_the_model_does(kind: str) -> None:
    model = small(kind)
    ours, theirs = holding(model, IDS), holding(model, IDS)
    with captured(model) as step:
        for number, token_id in enumerate(IDS[:4]):
            logits, states = step.read(token_id, ours.length, ours)
            seen = model._module_logits([token_id], theirs)
            close(logits, seen)
            assert states.shape == (1, 2 * model.module.config.hidden_size)
            for cache in (ours, theirs):
                cache.commit(1)
            if number == 1:
                for cache in (ours, theirs):
                    cache.keep(torch.tensor([0, 2, 3, 5, 8]))
            if number == 2:
                for cache in (ours, theirs):
                    cache.grow_to(40)
    held = torch.arange(ours.length)
    for mine, yours in zip(ours.as_read(held), theirs.as_read(held), strict=True):
        close(mine, yours)
    first = [cache.first_written_rows(held, held.numpy()).tensors for cache in (ours, theirs)]
    for mine, yours in zip(*first, strict=True):
        close(mine, yours)


def test_a_batch_reads_in_each_conversation_what_it_reads_alone() -> None:
    model = small()
    caches = [holding(model, IDS[:count], 8 + count) for count in range(1, 4)]
    alone = [holding(model, IDS[:count]) for count in range(1, 4)]
    with captured(model) as step:
        tokens = [(5 + at, cache.length, cache) for at, cache in enumerate(caches)]
        logits, states = step.read_together(tokens * 7)  # more than are captured at once
        assert logits.shape == (21, model.vocab_size)
        for at, cache in enumerate(alone):
            one, state = step.read(5 + at, cache.length, cache)
            close(logits[at], one[0])
            close(states[at], state[0])
    most = ChosenToken.likeliest(logits)[1]
    assert most.id == int(logits[1].argmax())
    assert most.surprisal == pytest.approx(float(-torch.log_softmax(logits[1], -1).max()))


def test_attention_weights_are_those_that_the_model_shows() -> None:
    model = small()
    ours, theirs = holding(model, IDS), holding(model, IDS)
    shown, expected = PassWeights([1]), PassWeights([1])
    model.forward([5], theirs, observer=expected)
    with captured(model):
        model.forward([5], ours, observer=shown)
    weights, usual = shown.mean(), expected.mean()
    assert weights is not None
    assert usual is not None
    close(torch.from_numpy(weights), torch.from_numpy(usual))


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations within its block that a GPU would run a kernel for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.counts[func.name()] += not re.search("empty|_unsafe_view", func.name())
        return made


def counted_kernels(calls: Counter[str]) -> dict[str, Any]:
    """Stand-ins for two kernels of Triton, which are only counted."""

    def add_and_normalize(x: Tensor, y: Any, *_: Any) -> tuple[Tensor, Tensor]:
        calls["norm"] += 1
        return x.new_empty(x.shape), x.new_empty(x.shape, dtype=_[-1])

    def gate(gate: Tensor, up: Tensor, *, dtype: torch.dtype) -> Tensor:
        calls["gate"] += 1
        return gate.new_empty(gate.shape, dtype=dtype)

    return {"add_and_normalize": add_and_normalize, "gate": gate}


def kernels_a_layer(monkeypatch: pytest.MonkeyPatch, batch: int, kernels: Any) -> float:
    """How many kernels a layer a step takes, with kernels of Triton that are only counted."""
    calls, stub = Counter[str](), ModuleType("sirchat.models.kernels")

    def multiply(x: Tensor, weight: Tensor, *_: Any, gated: bool, **how: Any) -> Tensor:
        calls["multiply"] += 1
        return x.new_empty(len(x), len(weight) // (1 + gated))

    def attend(rows: Tensor, *_: Any, kv_heads: int, **how: Any) -> tuple[Tensor, None]:
        calls["attend and merge"] += 2
        return rows[:, : -2 * kv_heads], None

    vars(stub).update(multiply_fused=multiply, attend=attend, **counted_kernels(calls))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr("sirchat.models.llama_step.find_spec", lambda name: True)
    totals = []
    for layers in (2, 4):
        module = build("llama", {"num_hidden_layers": layers}, torch.bfloat16)
        model = wrap_model("small", module, None)
        caches = [holding(model, IDS) for _ in range(batch)]
        body = LlamaStep(model.module, kernels)
        numbers = torch.zeros(5, batch, dtype=torch.int64)
        calls.clear()
        # Casts are no operations of their own in inference mode.
        how = torch.no_grad() if kernels == "triton" else torch.inference_mode()
        with how, Calls(calls):
            body(numbers[0], numbers[1], numbers[2], numbers[3:], caches)
        totals.append(calls.total())
    return (totals[1] - totals[0]) / 2


def test_a_layer_takes_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_a_layer(monkeypatch, 1, "triton") == 6
    assert kernels_a_layer(monkeypatch, 4, "triton") == 9
    assert kernels_a_layer(monkeypatch, 1, "torch") <= 40


def test_a_layer_of_a_prompt_takes_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash(queries: Tensor, keys: Tensor, values: Tensor, **how: Any) -> tuple[Tensor]:
        assert keys.shape[1] < queries.shape[1]  # they are shared, not copied
        calls["flash"] += 1
        return (torch.empty_like(queries),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    totals, calls = list[int](), Counter[str]()
    for layers in (2, 4):
        module = build("llama", {"num_hidden_layers": layers}, torch.bfloat16)
        model = with_decoder(wrap_model("small", module, None))
        LlamaStep(model.module, "torch")  # joins weights
        model.module.model.kernels = SimpleNamespace(**counted_kernels(calls))
        cache = model.new_cache(12)
        with torch.no_grad(), Calls(calls):
            for count in (6, 4):
                calls.clear()
                model.module(torch.tensor([IDS[:count]]), cache=cache)
                cache.commit(count)
        totals.append(calls.total())
    assert (totals[1] - totals[0]) / 2 == 17


def test_neither_a_step_nor_a_choice_waits_for_the_device() -> None:
    for sampling in (Sampling(), Sampling(repetition_penalty=1.2, repetition_window=5)):
        with simulated_devices():
            module, device = build("llama", {"num_hidden_layers": 2}), DEVICES[0]
            move(module, device)
            model = wrap_model("small", module, None)
            step = CapturedStep(
                LlamaStep(module, "torch"), device, captures=False, encoder=model.encoder
            )
            model.use_decode_step(step)
            # The results are copied to the host without a wait, which the simulation can't tell.
            state = step.run_buffers
            hosts = {
                "host_results": torch.zeros_like(state.results),
                "host_encoded": torch.zeros_like(state.encoded),
            }
            step.run_buffers = state._replace(**hosts)
            engine = Engine(model, CacheSettings(Entropy(), 24))
            prefill(engine, IDS)
            choice = device_choice(Sampler(sampling), step)
            assert choice is not None
            run = DeviceRun(step, engine.cache, choice, lambda readings: None)
            assert engine.logits is not None
            run.begin(engine.logits, len(IDS), IDS)
            run.resume(run.result().id, len(IDS), IDS)
            step.body.graph_key([engine.cache])
            with refuses_waits():
                run.launch()
                run.launch()
            assert {run.result().is_valid, run.result().is_valid} == {True}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=1),
        Sampling(temperature=0.8, top_p=0.9, min_p=0.02, seed=2),
        Sampling(temperature=0.8, seed=3),
        Sampling(temperature=1.3, repetition_penalty=1.2, repetition_window=9, seed=4),
    ],
)
def test_every_setting_of_a_chat_chooses_in_the_graph_what_the_host_would(
    sampling: Sampling,
) -> None:
    size, sampler, ids = 3000, Sampler(sampling), some_ids(70)
    random, undecided = np.random.default_rng(0), 0
    with captured(small()) as step:
        choice = device_choice(sampler, step)
        assert choice is not None
        assert choice.choose is not None
        logits, number = torch.zeros(size), torch.zeros(1, dtype=torch.float64)
        recent = torch.tensor(ids[len(ids) - choice.window :])
        choose = partial(choice.choose, logits, recent, number)
        graph = step.graph("choice", lambda: tuple(part.double() for part in choose()))
        for position in range(200):
            logits.copy_(torch.tensor(3 * random.normal(size=size)))
            number.copy_(torch.from_numpy(choice.random_numbers(position, 1)))
            graph.replay()
            chosen, is_valid = graph.outputs
            expected = sampler.pick(logits, lambda count: ids[-count:], position)
            assert not is_valid or chosen == expected
            undecided += not is_valid
    assert undecided < 10


def test_rounding_may_decide_no_draw_from_all() -> None:
    with captured(small()) as step:
        choice = device_choice(Sampler(Sampling(temperature=1.0)), step)
        assert choice is not None
        assert choice.choose is not None
        none, logits = torch.zeros(0, dtype=torch.int64), torch.zeros(4)
        for number, expected in ((0.1, (0, True)), (0.6, (2, True)), (0.999, (3, True))):
            found = choice.choose(logits, none, torch.tensor([number], dtype=torch.float64))
            assert tuple(map(int, found)) == expected
        for number in (0.25, 0.5 - 1e-7, 0.75 + 1e-7):  # where an id ends
            found = choice.choose(logits, none, torch.tensor([number], dtype=torch.float64))
            assert not found[1]


def test_who_can_not_be_captured_decodes_in_the_next_way_or_as_before() -> None:
    model = small()

    def fails() -> Any:
        raise ModelError("no compiler")

    class Wrong(LlamaStep):
        def __call__(self, *inputs: Any, **options: Any) -> tuple[Tensor, ...]:
            logits, *rest = super().__call__(*inputs, **options)
            return (-logits, *rest)

    def tried(*bodies: Any) -> Any:
        with captured(model):
            return capture_first(bodies, model.device, model.step_error, model.encoder)

    def right() -> LlamaStep:
        return LlamaStep(model.module, "torch")

    step, problems = tried(fails, lambda: Wrong(model.module, "torch"), right)
    assert type(step.body) is LlamaStep
    assert problems == "no compiler; its logits differ by 2"
    assert tried(fails, fails) == (None, "no compiler")
    assert tried(right).problems == ""


def test_logits_that_are_no_numbers_end_a_reply_with_an_error() -> None:
    model = small()
    engine = Engine(model, CacheSettings(Entropy(), 24))
    with captured(model):
        prefill(engine, IDS)
        model.module.model.norm.weight.data.fill_(torch.nan)
        with pytest.raises(ModelError, match="are not numbers"):
            generate(engine, 4, sampler=Sampler(Sampling()))
    assert engine.cache.length <= 8


def test_a_reply_that_has_ended_keeps_no_conversation_in_memory() -> None:
    model = small()
    with captured(model):
        engine = Engine(model, CacheSettings(Entropy(), 24))
        prefill(engine, IDS)
        generate(engine, 4, sampler=Sampler(Sampling()))
        cache = weakref.ref(engine.cache)
        del engine
        gc.collect()
        assert cache() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma"}, "its layers (gemma) are not like Llama's"),
        ({"head_dim": 24}, "its heads have 24 dimensions, which is no power of two from 16 on"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "its positions depend on the number of tokens",
        ),
    ],
)
def test_what_our_step_can_not_compute_is_said(changes: dict[str, Any], reason: str) -> None:
    kind = changes.pop("model_type", "llama")
    module = build(kind, {"num_hidden_layers": 2, **changes})
    with pytest.raises(ModelError) as raised:
        LlamaStep(module, "torch")
    assert str(raised.value) == reason


@pytest.mark.gpu
def test_a_gpu_reads_the_same_with_and_without_a_graph_and_ahead() -> None:
    from plain_model import load_model

    model = load_model("tiny", device="cuda")
    step = model.decode_step
    assert isinstance(step, CapturedStep)
    said = []
    for captures in (True, False):
        how = step.body, model.device
        model.use_decode_step(CapturedStep(*how, captures=captures, encoder=step.encoder))
        for ahead in (True, False):
            engine = Engine(model, CacheSettings(Entropy(), 64, archive=2**24))
            prefill(engine, some_ids(60, 1, model.vocab_size))
            with pytest.MonkeyPatch.context() as patch:
                if not ahead:
                    patch.setattr("sirchat.engine.reader.device_choice", lambda *_: None)
                records = generate(engine, 100, sampler=Sampler(Sampling()))
            said.append([record.id for record in records if hasattr(record, "id")])
    assert all(ids == said[0] for ids in said)
    assert len(said[0]) == 100


def test_an_id_that_the_model_lacks_is_refused_before_the_device_sees_it() -> None:
    model = small()
    with captured(model) as step:
        model.use_decode_step(step)
        with pytest.raises(ModelError, match=f"has no token {model.vocab_size}"):
            model.forward([model.vocab_size], holding(model, IDS))
