"""A step of any family, recorded once, reads each later token as the model itself does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from captured import RecordedGraph, why_not
from families import HELD, HYBRIDS, build, loaded
from simulated_devices import move, refuses_waits, simulated_devices
from sirchat.memory.cache import BoundedCache
from sirchat.memory.hub_cache import HubRowLayer
from sirchat.models.attention_hook import install_hook
from sirchat.models.hidden_states import concat_states, record_states
from sirchat.models.hub_step import HubStep
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.packing import PackedExperts
from sirchat.text.anchors import Anchors

# Sliding windows, experts and sinks, compressed keys, rotated pairs, layers without rotation.
TELLING = ("gemma3", "gpt-oss", "deepseek-mla", "cohere", "smollm3-nope", "llama4")
WAIT = {"longcat-flash", "falcon"}  # a loop over experts; an index from the host
SCORED = (1, 3)


class Talk:
    """Two caches of one model: one is read by a recorded step, one by the model itself."""

    def __init__(self, model: LoadedModel, ids: Sequence[int], capacity: int) -> None:
        self.model, self.step = model, HubStep(model, SCORED)
        self.ours, self.theirs = self.caches = [model.new_cache(capacity) for _ in range(2)]
        for cache in self.caches:
            cache.set_positions(absolute_positions=True)
            model.forward(ids, cache)
            cache.commit(len(ids))
        self.numbers = [torch.zeros(1, dtype=torch.int64, device=model.device) for _ in range(3)]
        self.record()

    @torch.inference_mode()
    def record(self) -> None:
        """Record a step; until then, the slots that are not in use contain NaN."""
        for tensor in (tensor for layer in self.ours.row_layers for tensor in layer.tensors):
            assert tensor.buffer is not None
            tensor.buffer[:, :, :, self.ours.length :] = torch.nan
        self.key = self.step.graph_key([self.ours])
        self.set(1, self.ours.length, 0)
        self.graph, recording = new_graph(self.model.device)
        if self.model.device.type == "cuda":
            self.take_step()  # libraries may not be loaded while it captures
        with recording:
            self.logits, self.states = self.take_step()

    def take_step(self) -> tuple[Tensor, ...]:
        ids, lengths, positions = self.numbers
        return self.step(ids, lengths, positions, None, [self.ours])

    def set(self, *numbers: int) -> None:
        for tensor, number in zip(self.numbers, numbers, strict=True):
            tensor.fill_(number)

    def read(self, ids: Sequence[int], position: int) -> None:
        """Read ids one by one over both caches; logits, states and rows must be equal."""
        for at, one in enumerate(ids, position):
            self.set(one, self.ours.length, at)
            self.graph.replay()
            with record_states(self.model.module, SCORED) as states:
                logits = self.model.forward([one], self.theirs, positions=[at])
            close(self.logits, logits)
            close(self.states, concat_states(states))
            for cache in self.caches:
                cache.commit(1, at)
            assert self.step.graph_key([self.ours]) == self.key
        rows = torch.arange(self.ours.length)
        for mine, their in zip(*(rows_of(cache, rows) for cache in self.caches), strict=True):
            close(mine, their)


def new_graph(device: torch.device) -> tuple[Any, AbstractContextManager[Any]]:
    """An empty graph, and the block in which it records."""
    if device.type == "cuda":
        captured = torch.cuda.CUDAGraph()
        return captured, torch.cuda.graph(captured)
    graph = RecordedGraph()
    return graph, graph


def rows_of(cache: BoundedCache, rows: Tensor) -> list[Tensor]:
    """All rows, as read and as first written."""
    return [*cache.as_read(rows), *cache.first_written_rows(rows, rows.numpy()).tensors]


def close(ours: Tensor, theirs: Tensor) -> None:
    """Compare with what rounds otherwise; NaN is never close."""
    error = float((ours - theirs).float().norm() / theirs.float().norm())
    assert error < (1e-5 if ours.device.type == "cpu" else 3e-2)


def ids_of(count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(0).integers(3, 128, count).tolist()
    return ids


def of_family(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The model of that family; all its passes run its own module."""
    more = {"attention_chunk_size": 16} if name == "llama4" else {}
    model_type, overrides = HELD[name]
    module = build(model_type, {**overrides, **more}, dtype).to(device)
    model = replace(loaded(name), module=module)
    model.use_decode_step(None)
    return model


@pytest.mark.parametrize("name", TELLING)
def test_a_replayed_step_reads_as_the_model_does(name: str) -> None:
    evict_and_grow(of_family(name))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(HELD.keys() - WAIT))
def test_a_captured_step_reads_as_the_model_does(name: str, dtype: torch.dtype) -> None:
    evict_and_grow(of_family(name, "cuda", dtype))


def evict_and_grow(model: LoadedModel) -> None:
    """Read ids, also after an eviction and in larger buffers."""
    ids = ids_of(40)
    talk = Talk(model, ids[:26], capacity=32)
    talk.read(ids[26:32], 26)
    for cache in talk.caches:  # the first evicted row moves all others
        cache.keep(torch.tensor([at for at in range(32) if at % 7]))
    talk.read(ids[32:36], 32)
    for cache in talk.caches:
        cache.grow_to(40)
    before = talk.key
    talk.record()
    assert talk.key != before
    talk.read(ids[36:40], 36)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TELLING, *sorted(WAIT)])
def test_a_step_waits_for_no_device(name: str) -> None:
    model = of_family(name)
    usual = model.new_cache(8)
    model.forward(ids_of(5), usual)
    usual.commit(5)
    rows = usual.first_written_rows(torch.arange(5), np.arange(5))
    expected = model.forward([7], usual)
    with simulated_devices() as (device, _):
        move(model.module, device)
        there = replace(model)  # which looks for its device anew
        ours = there.new_cache(8)
        ours.replace(rows)
        step = HubStep(there, ())
        step.graph_key([ours])
        ids, slots = (torch.tensor([number], device=device) for number in (7, 5))
        with refuses_waits():
            if name in WAIT:
                with pytest.raises(RuntimeError):
                    step(ids, slots, slots, None, [ours])
                return
            logits, states = step(ids, slots, slots, None, [ours])
        close(logits.cpu(), expected)
        assert states.shape == (1, 0)


def test_a_model_of_transformers_can_be_captured() -> None:
    for name in TELLING:
        assert why_not(loaded(name)) == ""
        assert why_not(loaded(name, torch.bfloat16)) == ""


def test_who_watches_attention_changes_nothing() -> None:
    model = of_family("gemma3")
    assert install_hook(model.module)
    assert why_not(model) == ""


def test_what_can_not_be_captured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(**changed: Any) -> str:
        return why_not(replace(of_family("phi"), **changed))

    hybrid = wrap_model("lfm2", build("lfm2", HYBRIDS["lfm2"]), None)
    assert why_not(hybrid) == "some of its layers keep a state"
    spread, own, failing, packed = (build("phi", {}) for _ in range(4))
    spread.hf_device_map = {"model": 0, "lm_head": "cpu"}
    assert why(module=spread) == "it is spread over several devices"
    own.__class__ = type("Phi", (type(own),), {"__module__": "transformers_modules.phi"})
    assert why(module=own) == "its code is not that of transformers"
    failing.forward = None
    assert why(module=failing) == "'NoneType' object is not callable"
    packed.experts = PackedExperts(torch.nn.Module(), dict.fromkeys(("gate", "up", "down"), ()))
    assert why(module=packed) == "its experts are packed"
    anchored = of_family("phi")
    Anchors("ac", token_id=3).write_to_config(anchored.module.config)
    assert why_not(anchored) == "it compresses its text into anchors"
    monkeypatch.setattr(HubRowLayer, "is_compileable", False)  # then transformers makes no mask
    assert why().startswith("its logits differ by 0.")


def test_a_step_that_fails_leaves_the_cache_as_it_was() -> None:
    model, ids = of_family("phi"), ids_of(6)
    cache, other = (model.new_cache(8) for _ in range(2))
    for one in (cache, other):
        model.forward(ids[:5], one)
        one.commit(5)
    step = HubStep(model, ())
    number = torch.tensor([1])
    with pytest.raises(IndexError):
        step(torch.tensor([10**6]), number, number, None, [cache])
    close(model.forward(ids[5:], cache), model.forward(ids[5:], other))
