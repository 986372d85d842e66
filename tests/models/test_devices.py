"""A model over several devices, or partly on disk, does just what it does on one.

Each layer's keys and values are where the layer is computed. Two devices are simulated, and refuse
every operation that mixes them; so each transfer that is missing is an error here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from chatting import hub_tokenizer, session
from families import build
from gguf_file import write_gguf
from plain_model import load_model
from simulated_devices import DEVICES, KIND, refuses_waits, simulated_devices
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError
from sirchat.models.devices import DISK, DeviceMap, free_gpu_bytes, make_device_map
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import surprisal, surprisal_of_states
from sirchat.saved.saved_state import model_fingerprint

pytestmark = pytest.mark.slow

SIM_0, SIM_1 = (f"{KIND}:{at}" for at in range(2))
# Of the embeddings, the four layers, the last norm, RoPE and the output head
MAPS = {
    "cpu and disk": ["disk", "cpu", "disk", "disk", "cpu", "cpu", "cpu", "disk"],
    "two devices": [SIM_0, SIM_0, SIM_0, SIM_1, SIM_1, SIM_1, SIM_0, SIM_0],
    "cpu, devices and disk": ["cpu", "cpu", SIM_0, "disk", SIM_1, "cpu", "cpu", SIM_1],
}
_PARTS = (
    *("model.embed_tokens", *(f"model.layers.{at}" for at in range(4))),
    *("model.norm", "model.rotary_emb", "lm_head"),
)

# Where each layer's keys and values are: those of layers in main memory or on disk are on the first
# GPU, if there is one.
ROWS_AT = {
    "cpu and disk": ["cpu"] * 4,
    "two devices": [SIM_0, SIM_0, SIM_1, SIM_1],
    "cpu, devices and disk": [SIM_0, SIM_0, SIM_0, SIM_1],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of four layers with random weights, which never ends its turn."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), hub_tokenizer()
    module = build("llama", {"vocab_size": len(tokenizer), "tie_word_embeddings": False})
    with torch.no_grad():
        module.lm_head.weight[:8] = 0.0
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    align(folder / "model.safetensors")
    return folder


def align(file: Path) -> None:
    """Let the weights begin where a copy of them would: the rounding of products depends on it."""
    weights = load_file(file)
    for size in range(64):
        save_file(weights, file, {"format": "pt", "fill": "-" * size})
        if (8 + struct.unpack("<Q", file.read_bytes()[:8])[0]) % 64 == 0:
            return


@pytest.fixture
def simulation() -> Iterator[None]:
    with simulated_devices():
        yield


def load(folder: Path, devices: list[str] | None = None) -> LoadedModel:
    """The model with its parts on these devices, or on the CPU."""
    how: dict[str, Any] = {"device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        if devices is not None:
            chosen = [one if one in ("cpu", DISK) else torch.device(one) for one in devices]
            placed = dict(zip(_PARTS, chosen, strict=True))
            options = {"device_map": placed, "offload_folder": str(folder / "offloaded")}
            patch.setattr(DeviceMap, "options", lambda *_: options)
            how = {"device_map": "auto"}
        model = load_model(str(folder), for_hub=True, dtype="float32", **how)
    # What a CPU alone computes in other ways, which round differently; so does torch for gradients.
    model.use_decode_step(None)
    vars(model)["has_linear_head"] = False
    model.module.requires_grad_(False)
    return model


def rows_of(chat: Session) -> list[Tensor]:
    """Keys and values of the held rows of each layer, then of all rows, on the CPU."""
    cache, kept = chat.engine.cache, chat.engine.store.copy_key_values()
    assert kept is not None
    layers = range(len(cache.row_layers))
    views = [view(n) for n in layers for view in (cache.layer_keys, cache.layer_values)]
    return [one.cpu().clone() for one in [*views, *kept.tensors]]


POLICIES = ("keydiff",)
RECALL = {"recall": "mips", "recall_query": "recent"}


def talk(model: LoadedModel) -> list[Any]:
    """A chat that uses everything that moves rows; returns what it holds after each step."""
    chat = session(
        model, budget=48, recent=8, max_new_tokens=1, policy="salience", attention="on", recall_n=8
    )
    told: list[Any] = []

    def note() -> None:
        told.append(
            ([turn.text for turn in chat.turns], chat.engine.save().held.tolist(), rows_of(chat))
        )

    def say(text: str) -> None:
        list(chat.ask(text))
        note()

    say("Our zebra is called Quixbert, and it lives in Lisbon.")
    say("What a rainy day it is today.")
    for policy in POLICIES:
        chat.switch("/policy", policy=policy)
        say(f"Tell me more of {policy}.")
    told.append([one.log_probabilities for one in chat.score_continuations(["Yes, it is.", "No."])])
    told.append(chat.attention_paid(len(chat.turns) - 1))
    chat.switch("/policy", policy="salience")
    chat.switch("/recall", **RECALL)
    say("What is our zebra called?")
    chat.switch("/recall", recall="off", recall_query="turn")
    chat.undo()
    note()
    chat.switch("/budget", budget=64)
    note()
    chat.switch("/set", positions="stream")
    say("Where does it live?")
    chat.pin("zebra")
    note()
    chat.erase("Lisbon")
    note()
    again = Session(model, chat.profile)
    seen = chat.engine.save()
    again.load(
        seen,
        chat.state,
        chat.engine.store.copy_key_values(),
        chat.ledger.attention.checkpoint(seen.held),
    )
    chat = again
    say("And now?")
    return told


def compare(found: list[Any], expected: list[Any]) -> None:
    for step, (here, there) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(there, tuple):
            assert here == there, step
            continue
        assert here[:2] == there[:2], step
        assert all(map(torch.equal, here[2], there[2])), step


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return talk(load(folder))


def test_the_simulation_refuses_what_mixes_devices(simulation: None) -> None:
    one, other = (torch.ones(2, device=device) for device in DEVICES)
    for mixed in (other, torch.ones(2)):
        with pytest.raises(RuntimeError, match="mixes"):
            _ = one + mixed
        with pytest.raises(RuntimeError, match="mixes"):
            torch.stack([one, mixed])
    assert (one + other.to(one.device)).device == DEVICES[0]
    assert (one * 2).tolist() == [2, 2]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x.sum().item(),
    "a truth": lambda x: bool(x.any()),
    "a list": lambda x: x.tolist(),
    "a comparison": lambda x: torch.equal(x, x),
    "closeness": lambda x: torch.allclose(x, x),
    "places": lambda x: x.nonzero(),
    "chosen numbers": lambda x: x[x > 1],
    "a copy to the host": lambda x: x.cpu(),
    "a copy from the host": lambda x: torch.ones(2).to(x.device),
    "a copy into another": lambda x: x.copy_(torch.ones(2)),
    "a copy to another device": lambda x: x.to(DEVICES[1]),
    "a tensor of a list": lambda x: torch.tensor([1.0], device=x.device),
    "as often as it says": lambda x: x.repeat_interleave(x.long()),
    "classes": lambda x: F.one_hot(x.long()),
}


@pytest.mark.parametrize("inference", [True, False])
def test_the_simulation_can_refuse_to_wait(inference: bool, simulation: None) -> None:
    x = torch.ones(2, device=DEVICES[0])
    with torch.inference_mode(inference):
        for wait in WAITS.values():
            wait(x)
            with refuses_waits(), pytest.raises(RuntimeError, match="waits for"):
                wait(x)
        with refuses_waits():
            x[x > 2] = 0.0  # fills, without a look at the places
            x.repeat_interleave(2)
            y = F.linear(x.double()[None], torch.ones(3, 2, device=x.device).double())
            assert torch.ones(2).sum().item() == 2.0  # the host waits for nobody
    assert y.tolist() == [[2.0, 2.0, 2.0]]


_LONG = pytest.mark.skipif(not os.environ.get("SIRCHAT_ATTACK"), reason="a longer form")


@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=_LONG) for one in MAPS if "," not in one), [*MAPS][-1]]
)
def test_a_chat_over_several_devices_is_that_on_one(
    name: str, folder: Path, expected: list[Any]
) -> None:
    with ExitStack() as stack:
        if name != "cpu and disk":
            stack.enter_context(simulated_devices())
        model = load(folder, MAPS[name])
        assert [str(one) for one in model.row_devices()] == ROWS_AT[name]
        compare(talk(model), expected)


def test_rows_weights_and_archive_are_counted_where_they_are(folder: Path) -> None:
    whole = load(folder)
    with simulated_devices():
        model = load(folder, MAPS["cpu, devices and disk"])
        assert model_fingerprint(model) == model_fingerprint(whole)
        chat = session(model, budget=48, recent=8, max_new_tokens=1)
        list(chat.ask("Our zebra is called Quixbert, and it lives in the old town of Lisbon. " * 3))
        held = {one.device: one for one in chat.memory}
        layer = 4 * sum(one.numel() for one in whole.module.model.layers[0].parameters())
        row = 4 * 48 * 3 * 2 * 16  # float32, budget, two keys and a value, heads, dimensions
        assert set(held) == {"cpu", SIM_0, SIM_1, DISK}
        assert held[DISK].weights == layer
        assert held[SIM_0].weights == pytest.approx(layer, rel=0.001)  # and where RoPE is
        assert sum(one.weights for one in held.values()) == pytest.approx(
            sum(4 * one.numel() for one in whole.module.parameters()), rel=0.01
        )
        assert [held[one].cache for one in ("cpu", SIM_0, SIM_1)] == [0, 3 * row, row]
        assert held["cpu"].archive > 0


def test_surprisal_is_computed_where_the_output_head_is(folder: Path, simulation: None) -> None:
    model = load(folder, MAPS["two devices"])
    ids = list(range(20, 60))
    vars(model)["has_linear_head"] = True
    read = model.read(ids, model.new_cache(40))
    head, hidden = load(folder).module.lm_head, torch.randn(40, 64)
    logits = model.forward(ids, model.new_cache(40)).cpu()
    torch.testing.assert_close(read.surprisal.cpu(), surprisal(logits[:-1], torch.tensor(ids[1:])))
    on_device = hidden.to(DEVICES[1])
    moved = surprisal_of_states(
        model.module.lm_head, on_device, torch.tensor(ids, device=DEVICES[1])
    )
    assert moved.tolist() == pytest.approx(
        surprisal_of_states(head, hidden, torch.tensor(ids)).tolist()
    )


@pytest.mark.parametrize("plan", ["auto", "balanced"])
def test_a_plan_fills_devices_or_gives_them_equally_much(
    plan: Any, folder: Path, simulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.models.devices.free_memory", lambda: 10**10)
    monkeypatch.setattr("sirchat.models.load.MIN_RESERVED_ROWS", 48)
    model = load_model(str(folder), device_map=plan, dtype="float32", budget=48)
    where = [str(one) for one in model.row_devices()]
    assert where == sorted(where)
    assert where.count(SIM_0) == (4 if plan == "auto" else 2)


@pytest.mark.parametrize("plan", ["auto", "balanced"])
def test_a_model_whose_head_has_the_weights_of_the_embeddings_is_spread(
    plan: Any, tmp_path: Path
) -> None:
    vocabulary = len(hub_tokenizer())
    build("llama", {"vocab_size": vocabulary, "tie_word_embeddings": True}).save_pretrained(
        tmp_path
    )
    hub_tokenizer().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device_map=plan, dtype="float32")
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"quantize": "int8"}], ids=str)
def test_a_spread_model_is_on_no_other_device(other: Any, folder: Path) -> None:
    with pytest.raises(SirchatError, match="can't be used with a device map"):
        load_model(str(folder), device_map="auto", **other)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"budget": 2000}, id="no room for the cache"),
        pytest.param({"gpu": 10**9 + 1000}, id="no room for a layer on the first device"),
    ],
)
def test_what_does_not_fit_on_the_first_device_is_refused(
    other: dict[str, int], folder: Path, simulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.models.devices.free_memory", lambda: 0)
    monkeypatch.setattr("sirchat.models.load.MIN_RESERVED_ROWS", 16)
    if gpu := other.pop("gpu", 0):
        monkeypatch.setattr("sirchat.models.devices.free_gpu_bytes", lambda _: gpu)
    with pytest.raises(SirchatError, match="does not fit, not even with its layers on disk"):
        load_model(str(folder), device_map="auto", dtype="float32", **other)  # type: ignore[arg-type]


def test_room_is_left_for_the_cache_in_its_own_type() -> None:
    how: dict[str, Any] = {"model": "tiny", "device_map": "auto", "dtype": "bfloat16"}
    profiles = Profile(**how), Profile(**how, cache_dtype="float32")
    halves, floats = (make_device_map(one, 48).cache_bytes for one in profiles)
    assert 0 < 2 * halves == floats


def test_what_torch_holds_of_an_earlier_model_is_free_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, said in (("mem_get_info", (500, 9000)), ("memory_reserved", 400)):
        monkeypatch.setattr(torch.cuda, name, lambda _, said=said: said)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    assert free_gpu_bytes(torch.device("cuda", 0)) == 800


def test_a_chat_with_a_gguf_file_over_a_cpu_and_a_gpu_is_that_on_the_cpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "model.gguf", load(folder), "F32")

    def read(**how: Any) -> LoadedModel:
        model = load_model(str(file), dtype="float32", **how)
        model.use_decode_step(None)
        vars(model)["has_linear_head"] = False
        return model

    whole = talk(read(device="cpu"))
    monkeypatch.setattr(DeviceMap, "split", lambda self, *_: replace(self, cpu_layers=1))
    with simulated_devices():
        model = read(device_map="auto")
        assert model.device_names == f"cpu and {SIM_0}"
        compare(talk(model), whole)
