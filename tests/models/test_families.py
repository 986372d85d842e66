"""Every family of models: which live under a budget, and that they compute what they should."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from families import HELD, HYBRIDS, REFUSED, build, loaded
from sirchat.engine.engine import Engine
from sirchat.engine.generation import Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken, TurnRef
from sirchat.errors import ModelError
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import Role
from sirchat.memory.policies.entropy import Entropy
from sirchat.memory.rope import Rotation
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.probe import cache_argument

EOS = 2
held = pytest.mark.parametrize("name", HELD)


@held
def test_logits_equal_those_over_transformers_own_cache(name: str) -> None:
    model, ids = loaded(name), random_ids(55)
    ours, theirs = model.new_cache(len(ids)), DynamicCache(config=model.module.config)
    for piece in in_pieces(ids, [40, 10, 1, 1, 1, 1, 1]):
        logits = model.forward(piece, ours)
        ours.commit(len(piece))
        with torch.inference_mode():
            expected = model.module(input_ids=torch.tensor([piece]), past_key_values=theirs)
        torch.testing.assert_close(logits, expected.logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-mla"])
def test_greedy_tokens_equal_those_of_generate(name: str) -> None:
    model, ids = loaded(name), random_ids(60)
    engine = Engine(model, CacheSettings(Entropy(), budget=128))
    list(engine.prefill(ids, [Role.USER] * len(ids), TurnRef(0, 0)))
    reply = Generation(
        engine, Sampler(Sampling()), TurnRef(1, 0), stop_ids=frozenset([EOS]), max_new_tokens=24
    )
    got = [record.id for record in reply if isinstance(record, GeneratedToken)]
    expected = model.module.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=24, eos_token_id=EOS
    )
    assert got == [i for i in expected[0, len(ids) :].tolist() if i != EOS]


@pytest.mark.slow
@held
def test_after_evictions_every_layer_holds_first_written_rows_turned_once(name: str) -> None:
    model = loaded(name)
    for cache, written in evictions(model, seed=3):
        for layer, rotations in enumerate(model.rotations):
            for slot, rotation in enumerate((rotations.key, rotations.value)):
                expected = torch.cat(
                    [
                        turned(rows[layer][slot], rotation, now - then)
                        for now, (rows, then) in enumerate(written)
                    ],
                    dim=2,
                )
                view = (BoundedCache.layer_keys, BoundedCache.layer_values)[slot](cache, layer)
                torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "window"), [("llama", None), ("qwen2", None), ("gemma3", 24), ("mistral-sliding", 24)]
)
def test_a_model_tells_the_width_of_its_sliding_window(name: str, window: int | None) -> None:
    assert loaded(name).window == window


def test_single_tokens_of_models_of_these_shapes_and_no_others_are_read_by_a_decode_step() -> None:
    short = ["llama", "llama3-rope", "yarn-rope", "qwen2", "qwen3"]
    assert [name for name in HELD if DecodeStep.supports(loaded(name).module)] == short
    assert DecodeStep.supports(build("mistral", {"sliding_window": None}))
    assert not DecodeStep.supports(build("mistral", {"sliding_window": 24}))


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-mla"])
def test_a_token_whose_keys_are_zero_shows_no_rotation(name: str) -> None:
    padded = without_embeddings(build(*HELD[name]), [5, 6])
    expected = [(layer.key, layer.value) for layer in loaded(name).rotations]
    found = [(layer.key, layer.value) for layer in wrap_model(name, padded, None).rotations]
    for ours, theirs in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or ours.has_same_angles(theirs)


def test_a_hybrid_whose_padding_is_zero_runs() -> None:
    padded = without_embeddings(build("lfm2", HYBRIDS["lfm2"]), [1, 5])
    assert any(layer.key for layer in wrap_model("lfm2", padded, None).rotations)


def test_a_model_whose_keys_are_all_zero_is_refused() -> None:
    with pytest.raises(ModelError, match="of all 32 tokens that were tried are zero"):
        wrap_model("it", without_embeddings(build(*HELD["llama"]), range(128)), None)


def without_embeddings(module: Any, ids: Iterable[int]) -> Any:
    with torch.no_grad():
        module.get_input_embeddings().weight[list(ids)] = 0
    return module


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_evict_one_token_is_refused_in_one_line(name: str) -> None:
    model_type, overrides, reason = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        wrap_model("this model", build(model_type, overrides), None)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("this model")
    assert "\n" not in str(caught.value)


def test_rotations_that_change_with_the_length_hold_the_model_to_its_original_length() -> None:
    original = {"rope_theta": 1e4, "original_max_position_embeddings": 256}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longrope = {"rope_type": "longrope", **factors, **original}
    dynamic = {"rope_type": "dynamic", "factor": 4.0, **original}
    phi3 = build("phi3", {"rope_parameters": longrope, "original_max_position_embeddings": 256})
    llama = build("llama", {"rope_parameters": dynamic})
    for module in (phi3, llama):
        assert wrap_model("it", module, None).context_length == 256
    assert loaded("yarn-rope").context_length == 1024


# For each held row: each layer's key and value as the model wrote them, and the position then.
Written = list[tuple[list[tuple[Tensor, Tensor]], int]]


def evictions(model: LoadedModel, seed: int) -> Iterator[tuple[BoundedCache, Written]]:
    """Five rounds of reading and keeping random rows; yields after each: the cache and its rows."""
    draw = random.Random(seed)
    cache = model.new_cache(64)
    written: Written = []
    for _ in range(5):
        new = random_ids(draw.randint(1, 24), draw.random())
        model.forward(new, cache)
        cache.commit(len(new))
        for slot in range(len(written), len(written) + len(new)):
            written.append((row_of(cache, slot), slot))
        kept = sorted(draw.sample(range(len(written)), draw.randint(1, min(40, len(written)))))
        cache.keep(torch.tensor(kept))
        written = [written[i] for i in kept]
        yield cache, written


def row_of(cache: BoundedCache, slot: int) -> list[tuple[Tensor, Tensor]]:
    views = [(cache.layer_keys(i), cache.layer_values(i)) for i in range(len(cache.row_layers))]
    at = slice(slot, slot + 1)
    return [(keys[:, :, at].clone(), values[:, :, at].clone()) for keys, values in views]


def turned(row: Tensor, rotation: Rotation | None, distance: int) -> Tensor:
    """`row` turned as complex numbers, in float64."""
    if rotation is None:
        return row
    dims = range(rotation.offset, rotation.offset + 2 * rotation.inv_freq.numel())
    half = len(dims) // 2
    firsts, seconds = dims[:half], dims[half:]
    if rotation.interleaved:
        firsts, seconds = dims[::2], dims[1::2]
    out = row.double()
    frequencies = rotation.inv_freq.tolist()
    for real, imaginary, frequency in zip(firsts, seconds, frequencies, strict=True):
        z = torch.complex(out[..., real], out[..., imaginary])
        z = z * torch.polar(torch.tensor(1.0), torch.tensor(distance * frequency)).to(z.dtype)
        out[..., real], out[..., imaginary] = z.real, z.imag
    return out.float()


def random_ids(count: int, seed: float = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=count)


def in_pieces(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    assert sum(sizes) == len(ids)
    for size in sizes:
        yield ids[:size]
        ids = ids[size:]


def test_the_cache_is_passed_under_the_name_that_the_model_gives_it() -> None:
    """transformers 5.24 renamed the argument, and warns of the old name."""

    class Newer:
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    class Older:
        def forward(self, input_ids: object, past_key_values: object = None) -> None: ...

    assert cache_argument(Newer(), 1) == {"cache": 1}
    assert cache_argument(Older(), 1) == {"past_key_values": 1}
