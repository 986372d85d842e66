"""A GGUF file over a CPU and a GPU says what it says on the CPU alone.

The GPU is simulated, with torch's kernels and a stand-in for CUDA graphs. It refuses operations
that mix it with the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import simulated_devices as simulation
from captured import StandIn
from chatting import hub_tokenizer
from engine_steps import Record, generate, prefill, some_ids
from families import build
from gguf_file import write_gguf
from gguf_models import floats_only, random_model, write_model
from native_library import has_library, loaded_library
from random_encoders import random_encoder
from simulated_devices import DEVICES, KIND, counted, simulated_devices
from sirchat.engine.engine import Engine
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken
from sirchat.errors import ModelError
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.by_attention import H2o
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.captured_step import CapturedStep
from sirchat.models.compiling import describe_decode_step
from sirchat.models.devices import DeviceMap, weights_by_device
from sirchat.models.encoder import EncoderOutput
from sirchat.models.load import load_model
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.packed import PackedLinear
from sirchat.models.packing import use_gpu_kernels
from sirchat.saved.saved_state import model_fingerprint

pytestmark = has_library

SIM = str(DEVICES[0])
GREEDY = Sampler(Sampling())
# Weights of the family, and how the file has them
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "F32"),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, "F32"),
    "qwen3": ("qwen3", {"head_dim": 16}, "F32"),
    "llama, packed": ("llama", {}, "Q4_0"),
    "qwen2, packed, tied": ("qwen2", {"tie_word_embeddings": True}, "Q8_0"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The library is there already, and a graph is a record of its operations."""
    monkeypatch.setattr("sirchat.models.compiling._open_library", lambda *_: loaded_library())
    monkeypatch.setattr("sirchat.models.load.compile_in_background", lambda: None)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("sirchat.models.captured_step.CudaGraph", StandIn)
    monkeypatch.setattr("sirchat.models.load.MIN_RESERVED_ROWS", 48)


@cache
def file_of(folder: Path, name: str) -> Path:
    kind, options, form = FILES[name]
    sizes = {"vocab_size": len(hub_tokenizer()), "tie_word_embeddings": False, **options}
    model = wrap_model(kind, build(kind, sizes), hub_tokenizer())
    return write_gguf(folder / f"{name}.gguf", model, form)


def load(folder: Path, name: str, **settings: Any) -> LoadedModel:
    how = "packed" if "packed" in name else "auto"
    settings = {"dtype": "float32", "quantize": how, "compile": "on", **settings}
    return load_model(str(file_of(folder, name)), **settings)


@contextmanager
def split(folder: Path, name: str, layers: int, **settings: Any) -> Iterator[LoadedModel]:
    """Within this block, a model with so many layers on the CPU, and the others on a device."""
    file_of(folder, name)
    with simulated_devices(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMap, "split", lambda self, *_: replace(self, cpu_layers=layers))
        yield load(folder, name, device_map="auto", **settings)


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu().float(), expected.cpu().float()
    return float((found - expected).norm() / expected.norm())


def read(model: LoadedModel, ids: list[int]) -> list[Tensor]:
    """The logits after a few ids in one pass, and then after each; rows leave in between."""
    cache = model.new_cache(16)
    logits = [model.forward(ids[:8], cache)[-1]]
    cache.commit(8)
    for number, token_id in enumerate(ids[8:]):
        logits.append(model.forward([token_id], cache)[0])
        cache.commit(1)
        if number == 3:
            cache.keep(torch.tensor([0, 1, 4, 5, 9, 11]))
        if number == 5:
            cache.grow_to(40)
    return [*logits, *cache.first_written_rows(torch.arange(10), cache._stream[:10]).tensors]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", FILES)
def test_a_model_reads_over_two_devices_as_on_the_cpu(name: str, layers: int, folder: Path) -> None:
    ids = some_ids(20)
    whole = load(folder, name, device="cpu")
    expected, mark = read(whole, ids), model_fingerprint(whole)
    with split(folder, name, layers) as model:
        assert [str(one) for one in model.row_devices()] == ["cpu"] * layers + [SIM] * (4 - layers)
        step = model.decode_step
        assert isinstance(step, CapturedStep)
        found = read(model, ids)
        assert step.first_layers is not None
        assert step.first_layers.count == layers
        assert step.capture_seconds > 0
        assert describe_decode_step(model) == (
            f"{layers} layers on the CPU in C++, the others in a CUDA graph of torch's operations"
        )
        assert model_fingerprint(model) == mark
    most = 0.03 if "packed" in name else 1e-4
    for at, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert error(here, there) < most, at


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILES)
def test_a_real_gpu_reads_so_too(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(20)
    expected = read(load(folder, name, device="cpu"), ids)
    monkeypatch.setattr(DeviceMap, "split", lambda self, *_: replace(self, cpu_layers=2))
    model = load(folder, name, device_map="auto")
    assert {one.type for one in model.row_devices()} == {"cpu", "cuda"}
    assert isinstance(model.decode_step, CapturedStep)
    for at, (here, there) in enumerate(zip(read(model, ids), expected, strict=True)):
        assert error(here, there) < 0.03, at


def talk(model: LoadedModel, policy: Policy) -> tuple[list[int], Engine]:
    """Greedy replies under a budget, an undo, and another policy; returns the ids said."""
    settings = CacheSettings(policy, 24, archive=2**24)
    engine, said = Engine(model, settings), list[Record]()
    prefill(engine, some_ids(20))
    said += generate(engine, 12, sampler=GREEDY)
    before = engine.checkpoint()
    said += generate(engine, 9, turn=2, sampler=GREEDY)
    engine.undo(before)
    engine.switcher.switch(replace(settings, policy=Entropy(recent=4)))
    said += generate(engine, 12, turn=2, sampler=GREEDY)
    ids = [one.id for one in said if isinstance(one, GeneratedToken)]
    return ids, engine


@pytest.mark.parametrize("policy", [Entropy(), H2o()], ids=["entropy", "h2o"])
def test_a_chat_says_the_same_words_and_holds_the_same_tokens(policy: Policy, folder: Path) -> None:
    ids, whole = talk(load(folder, "llama", device="cpu"), policy)
    with split(folder, "llama", 2) as model:
        found, engine = talk(model, policy)
        assert found == ids
        assert engine.ledger.held_positions.tolist() == whole.ledger.held_positions.tolist()
        surprisals = (one.ledger.column("surprisal")[1:].copy() for one in (engine, whole))
        torch.testing.assert_close(*map(torch.from_numpy, surprisals), rtol=1e-3, atol=1e-4)
        assert engine.cache.bytes_by_device() == dict.fromkeys(
            [torch.device("cpu"), DEVICES[0]], whole.cache.nbytes // 2
        )


def test_a_token_costs_one_copy_to_the_gpu_and_one_from_it(folder: Path) -> None:
    with split(folder, "llama, packed", 2) as model:
        engine = Engine(model, CacheSettings(Entropy(), 200))
        prefill(engine, some_ids(20))
        generate(engine, 2, sampler=GREEDY)
        for sampler in (GREEDY, Sampler(Sampling(temperature=0.8, top_k=40, seed=1))):
            with counted() as counts:
                generate(engine, 5, turn=2, sampler=sampler)
            assert counts == {"upload": 5, "download": 5}


def test_conversations_of_a_server_are_read_together(folder: Path) -> None:
    with split(folder, "qwen3", 2) as model:
        caches, alone = [], []
        for length in (3, 5, 8):
            cache = model.new_cache(12)
            model.forward(some_ids(length), cache)
            cache.commit(length)
            caches.append(cache)
        assert isinstance(model.decode_step, CapturedStep)
        for at, one in enumerate(caches):
            alone.append(model.decode_step.read(9 + at, one.length, one)[0][0])
        tokens = [(9 + at, one.length, one) for at, one in enumerate(caches)]
        together, _ = model.decode_step.read_together(tokens)
        assert all(error(here, there) < 1e-5 for here, there in zip(together, alone, strict=True))


@pytest.mark.parametrize("wanted", [(1, 2, 3, 4), (1, 3), (4,)])
def test_the_states_of_an_encoder_come_from_both_devices(
    wanted: tuple[int, ...], folder: Path
) -> None:
    with split(folder, "llama", 2, compile="off") as plain:
        model = replace(plain, encoder=random_encoder(plain, wanted))
        model.use_split_step(loaded_library())
        ids, vectors = some_ids(6), list[Any]()
        for step in (model.decode_step, None):
            model.use_decode_step(step)
            cache, output = model.new_cache(8), EncoderOutput(is_wanted=True)
            model.forward(ids[:5], cache)
            cache.commit(5)
            model.forward(ids[5:], cache, encoder_output=output)
            vectors.append(output.token_vectors)
        assert vectors[0].shape == (1, 5)
        assert error(*vectors) < 1e-4


@pytest.mark.parametrize("failure", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_token_that_only_the_cpu_has_read_is_read_again(
    failure: type[BaseException], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with split(folder, "llama", 2) as model:
        expected, engine = (Engine(model, CacheSettings(Entropy(), 24)) for _ in range(2))
        for one in (expected, engine):
            prefill(one, some_ids(20))
        generate(expected, 12, sampler=GREEDY)
        generate(engine, 5, sampler=GREEDY)
        usual, calls = StandIn.replay, list[None]()

        def fail(graph: StandIn) -> None:
            calls.append(None)
            if len(calls) == 3:
                raise failure
            usual(graph)

        monkeypatch.setattr(StandIn, "replay", fail)
        with pytest.raises(failure):
            generate(engine, 7, sampler=GREEDY)
        assert engine.cache.length == engine.ledger.held_count
        monkeypatch.setattr(StandIn, "replay", usual)
        generate(engine, 32 - engine.ledger.seen, sampler=GREEDY)
        ids = (one.ledger.column("token_id").tolist() for one in (engine, expected))
        assert next(ids) == next(ids)


def on_gpu(model: LoadedModel) -> int:
    return weights_by_device(model.module)[SIM]


@pytest.mark.parametrize("name", ["llama", "qwen2, packed, tied"])
def test_as_many_layers_as_fit_are_on_the_gpu(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 48 * 4 * 4 * 3 * 2 * 16  # budget, float32, layers, two keys and a value, heads, numbers
    monkeypatch.setitem(simulation.FREE, 0, 10**9)
    file_of(folder, name)
    with simulated_devices():
        every = load(folder, name, device_map="auto", budget=48, compile="auto")
        assert every.device == DEVICES[0]  # as on one device
        assert not hasattr(every.module, "hf_device_map")
        most, counts = on_gpu(every) + rows, list[int]()
        for free in range(most + 1000, 0, -most // 12):
            monkeypatch.setitem(simulation.FREE, 0, free)
            model = load(folder, name, device_map="auto", budget=48, compile="off")
            counts.append([str(one) for one in model.row_devices()].count("cpu"))
            assert on_gpu(model) + (rows if counts[-1] < 4 else 0) <= free
        assert counts == sorted(counts)
        assert set(counts) == {0, 1, 2, 3, 4}


def test_packed_embeddings_are_counted_on_the_cpu_and_the_head_on_the_gpu(folder: Path) -> None:
    with split(folder, "qwen2, packed, tied", 3) as model:
        held, rows = weights_by_device(model.module), model.vocab_size
        weights, others = 64 * 128 + 64 * 64 + 3 * 64 * 128, 4 * (2 * 64 + 128)
        in_file = 34 / 32  # bytes a weight
        assert held["cpu"] == pytest.approx(
            (rows * 64 + 3 * weights) * in_file + 3 * others, abs=99
        )
        assert held[SIM] == (rows * 64 + weights) * in_file + others + 4 * 64  # the last norm


def test_each_device_multiplies_by_its_own_method(folder: Path) -> None:
    with split(folder, "llama, packed", 2) as model:
        use_gpu_kernels(model.module)  # there are none here, so it is as before
        most = [
            part.matmul_method.max_native_rows
            for part in model.module.modules()
            if isinstance(part, PackedLinear)
        ]
        assert [rows > 0 for rows in most] == [True] * 14 + [False] * 15  # with the head


def test_the_memory_of_both_devices_is_told(folder: Path) -> None:
    whole = load(folder, "qwen2, tied", device="cpu")
    with split(folder, "qwen2, tied", 1) as model:
        held = weights_by_device(model.module)
        embeddings = whole.module.lm_head.weight.nbytes
        layer = sum(one.nbytes for one in whole.module.model.layers[0].parameters())
        assert held["cpu"] == pytest.approx(embeddings + layer, abs=200)  # RoPE
        assert held[SIM] == pytest.approx(embeddings + 3 * layer, abs=400)  # the last norm


def test_a_head_with_the_weights_of_the_embeddings_moves_alone(folder: Path) -> None:
    module = load(folder, "qwen2, tied", device="cpu", compile="off").module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    module.split(2, torch.device("cpu"))  # as torch does between a CPU and a GPU, but not simulated
    assert module.lm_head.weight is not module.model.embed_tokens.weight


def test_what_can_not_be_split_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "gemma.gguf"
    write_model(path, random_model("gemma3"), "gemma3", floats_only)
    monkeypatch.setitem(simulation.FREE, 0, 1_000_000)
    with simulated_devices():
        with pytest.raises(ModelError, match="its layers can't be split"):
            load_model(str(path), device_map="auto", dtype="float32", budget=48)
        with pytest.raises(ModelError, match="can't be balanced over GPUs"):
            load_model(str(file_of(folder, "llama")), device_map="balanced")
        with pytest.raises(ModelError, match="quantize=int8 can't be used with a device map"):
            load(folder, "llama", device_map="auto", quantize="int8")
    assert KIND in SIM
