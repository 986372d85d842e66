"""Every family of models: which live under a budget, and that they compute what they should.

`SIRCHAT_ATTACK=1` has each family that is supported evict, not those alone that differ most.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import __version__ as installed

import family_checks
import sirchat.models
from attacking import MANY
from families import HELD, HYBRIDS, REFUSED, TELLING, build, loaded
from family_checks import check_family, largest_difference
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken, TurnRef
from sirchat.errors import ModelError
from sirchat.memory.cache import LayerRotation
from sirchat.memory.ledger import Role
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.native_step import NativeStep
from sirchat.models.probe import cache_argument
from small_models import causal_families

EOS = 2


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
@pytest.mark.parametrize("name", HELD if MANY else TELLING)
def test_after_evictions_rows_and_logits_are_those_of_the_model_that_never_evicts(
    name: str,
) -> None:
    worst, _ = largest_difference(loaded(name))
    assert worst < 1e-4
    assert all(table()[kind].startswith("runs") for kind, _ in HELD.values())


@pytest.mark.parametrize(
    ("name", "window"), [("llama", None), ("qwen2", None), ("gemma3", 24), ("mistral-sliding", 24)]
)
def test_a_model_tells_the_width_of_its_sliding_window(name: str, window: int | None) -> None:
    assert loaded(name).window == window


def test_single_tokens_of_models_of_these_shapes_and_no_others_are_read_by_a_decode_step() -> None:
    short = ["llama", "llama3-rope", "yarn-rope", "qwen2", "qwen3"]
    tried = HELD if MANY else dict.fromkeys([*short, *TELLING])
    assert [name for name in tried if NativeStep.supports(loaded(name).module)] == short
    assert NativeStep.supports(build("mistral", {"sliding_window": None}))
    assert not NativeStep.supports(build("mistral", {"sliding_window": 24}))


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


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"),
    ],
)
def test_too_little_memory_is_no_fault_of_the_model(kind: str, problem: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    module = build(*HELD["llama"]) if kind == "llama" else build("lfm2", HYBRIDS["lfm2"])
    module.model.forward = fail
    with pytest.raises(MemoryError, match=r"too little memory is free .*allocate"):
        wrap_model("it", module, None)


def random_ids(count: int, seed: float = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=count)


def test_the_cache_is_passed_under_the_name_that_the_model_gives_it() -> None:
    """transformers 5.24 renamed the argument, and warns of the old name."""

    class Newer:
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    class Older:
        def forward(self, input_ids: object, past_key_values: object = None) -> None: ...

    assert cache_argument(Newer(), 1) == {"cache": 1}
    assert cache_argument(Older(), 1) == {"past_key_values": 1}


TABLE = Path(sirchat.models.__file__).with_name("FAMILIES.md")
SAMPLE = [
    *causal_families()[::96],
    *("deepseek_v3", "doge", "gemma3", "gemma4_text", "glm_moe_dsa", "gpt2", "lfm2", "mamba"),
    "qwen3_next",
]


@cache
def table() -> dict[str, str]:
    """For each family, what FAMILIES.md says of it."""
    rows = re.findall(
        r"^\| ((?:runs|refused|not built)[^|]*) \| (`.*`) \|$", TABLE.read_text(), re.M
    )
    return {name: said for said, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_table_names_every_family_of_the_installed_transformers() -> None:
    assert sorted(table()) == sorted(causal_families()), f"transformers {installed} has others"


@pytest.mark.slow
@pytest.mark.parametrize("family", SAMPLE)
def test_what_the_table_says_of_a_family_is_so(family: str) -> None:
    """For all families: `python tests/support/family_checks.py`, which takes about a minute."""
    assert check_family(family).in_words == table()[family]


def test_keys_that_do_not_move_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_rotation(*args: object) -> LoadedModel:
        model = wrap_model(*args)  # type: ignore[arg-type]
        return replace(model, rotations=[*model.rotations[:-1], LayerRotation(None)])

    monkeypatch.setattr(family_checks, "wrap_model", without_a_rotation)
    found = check_family("llama")
    assert found.status == "wrong"
    assert found.note.startswith("differs from recomputation by")
