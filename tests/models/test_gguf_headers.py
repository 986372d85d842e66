"""No key of a GGUF header is dropped: it is used as a folder uses it, or refused by its name.

A header gets one key changed, removed or added. The oracle is a model of transformers whose config
says the same as the changed header, with the same weights; what a header says is written down here
a second time, after llama.cpp's reader (`load_hparams`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

gguf = pytest.importorskip("gguf")

from attacking import attack  # noqa: E402
from gguf_models import MODELS, VOCABULARY, config_of, floats_only, random_model, write_model  # noqa: E402
from sirchat.errors import ModelError  # noqa: E402
from sirchat.models.gguf.header import GgufFile, parse_gguf  # noqa: E402
from sirchat.models.gguf.model import load_module  # noqa: E402
from sirchat.models.gguf.translate import refuse_unsupported  # noqa: E402

CASES = ["llama", "qwen2-yarn", "gemma3-long"]
IDS = list(range(3, 43))
Values = dict[str, Any]

# Keys that llama.cpp knows and the names in its Python package lack, or that are often in files.
MORE_KEYS = [
    *("rope.scale_linear", "attention.recurrent_layers", "hidden_activation", "num_loops"),
    *("attention.rope_pattern", "attention.value_scale", "deepstack_mapping", "made.up"),
]
# Settings of a config that a header says with one number, by the key of the header.
SAME_FOR_ALL = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
# What a key that is not there stands for, where it may be missing.
DEFAULTS = {
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 10000.0,
}
# Keys without an effect on the numbers of a text: what embeddings are made of, and norms of a kind
# that the models lack.
HARMLESS = ("pooling_type", "attention.layer_norm_epsilon")
# Values with which a key says what is so without it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (-1,),
}
# Keys of fractions that must be used, where a folder with the same setting can be.
OFTEN_USED = ("epsilon", "freq_base", "softcapping", "scale", ".factor", "beta_fast", "beta_slow")
ODD = [
    *(0, 1, -1, 2, 4, 2**31, 0.0, 0.5, 1.0, 4.0, math.nan, math.inf, True, False, "x", "", [], [1]),
    *("none", "linear", "yarn", "longrope"),
]
# Ways to say in an error what does not fit: a name of a tensor, or of a part of the model.
TENSOR = r"(blk|model|transformer|lm_head|token_embd|attn_output|rope_\w+|output)[\w.]*"


class Base(NamedTuple):
    """A model, and the file that it was written to."""

    architecture: str
    module: Any
    file: GgufFile
    logits: Tensor


class Change(NamedTuple):
    """One key of a header with another value; the value is `...` if it was removed."""

    key: str  # without the architecture's name
    value: Any


@cache
def keys_of(architecture: str) -> list[str]:
    """The keys of models in llama.cpp's table, without the architecture's name."""

    def names(group: type) -> Iterator[str]:
        for value in vars(group).values():
            if isinstance(value, type):
                yield from names(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                yield value.removeprefix("{arch}.")

    return sorted({*names(gguf.Keys), *MORE_KEYS})


@cache
def base_of(case: str) -> Base:
    with TemporaryDirectory() as folder:
        module = random_model(case)
        path = write_model(Path(folder) / "model.gguf", module, case, floats_only)
        file = parse_gguf(path)
        tensors = {
            name: type(one)(one.shape, one.type, one.data.copy())
            for name, one in file.tensors.items()
        }
    file = GgufFile(file.metadata, tensors)
    return Base(MODELS[case][0], module, file, logits_of(load_module(file, torch.float32).eval()))


def logits_of(module: Any) -> Tensor:
    with torch.inference_mode():
        return module(torch.tensor([IDS])).logits[0].float()  # type: ignore[no-any-return]


def change_of(random: Random, base: Base) -> Change:
    """A key of the header removed or with another value, or another key of llama.cpp's table."""
    said = base.file.settings
    if random.random() < 0.15:
        return Change(random.choice(list(said)), ...)
    if random.random() < 0.4:
        key = random.choice(keys_of(base.architecture))
    else:
        key = random.choice(list(said))
    if random.random() < 0.15:
        key = random.choice([one for one in keys_of(base.architecture) if "rope.scal" in one])
    value, layers = said.get(key), said["block_count"]
    near = [] if random.random() < 0.25 else near_values(value, layers)
    return Change(key, random.choice(near or [*ODD, [2] * layers, [True] * layers]))


def near_values(value: Any, layers: int) -> list[Any]:
    """Other values of the same kind."""
    if type(value) is int:
        near = [value + 1, value - 1, 2 * value, value // 2, float(value)]
        return [*near, [value] * layers, [value] * (layers - 1) + [value + 1]]
    if isinstance(value, float):
        return [value * 2, value / 2, value * 1.25, value * 7, -value, int(value)]
    if isinstance(value, list) and value:
        return [value[:-1], value[::-1], [*value[1:], value[0]], value[0], value[-1]]
    return []


def config_values(case: str, change: Change, said: Values) -> Values | None:
    """What the config of `case` says by the header `said`; None if the changed key says nothing."""
    architecture, key, value = MODELS[case][0], change.key, said.get(change.key)
    config = config_of(case)
    if key in NEUTRAL and not is_used(key, config.rope_parameters.get("rope_type", "")):
        return None
    if key.startswith("rope.") and key not in ("rope.dimension_count", "rope.dimension_count_swa"):
        return rope_values(case, said)
    if key == "rope.dimension_count":
        size = said.get("attention.key_length") or config.hidden_size // config.num_attention_heads
        part = (value or size) / size
        rope = {**config.rope_parameters, "partial_rotary_factor": part}
        is_even = isinstance(value, int | None) and not isinstance(value, bool)
        return {"rope_parameters": rope, "partial_rotary_factor": part} if is_even else {"x": value}
    if value is None:
        defaults = {
            "attention.head_count_kv": said["attention.head_count"],
            "attention.key_length": config.hidden_size // config.num_attention_heads,
            "vocab_size": VOCABULARY,
        }
        if architecture == "llama":  # where all of a head rotates
            defaults["attention.key_length"] = said["rope.dimension_count"]
        if key.endswith("feed_forward_length"):  # of one kind, where another one counts
            return {}
        value = defaults.get(key)
    value = DEFAULTS.get(key) if value is None else value
    name = SAME_FOR_ALL.get(key)
    if name is None or (key not in base_of(case).file.settings and not hasattr(config, name)):
        return None
    is_fraction = isinstance(getattr(config, name, None), float) or "softcapping" in name
    if is_fraction and type(value) is int:
        value = float(value)
    if name.endswith(("softcapping", "window")) and value == 0:
        value = None
    is_long = config.rope_parameters.get("rope_type") == "yarn"
    return {name: value, **(rope_values(case, said) if is_long else {})}


def is_used(key: str, kind: str) -> bool:
    """Whether a rotation of a kind takes a key of `NEUTRAL` as a setting."""
    is_setting = kind == "yarn" and key == "rope.scaling.yarn_attn_factor"
    return not key.startswith("rope.") or is_setting


def rope_values(case: str, said: Values) -> Values:
    """The rotation by a header's keys, as llama.cpp reads them and transformers says it."""
    config = config_of(case)
    whole = config.rope_parameters
    rope = dict(whole.get("full_attention", whole))
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if rope["rope_type"] in ("linear", "yarn", "default"):
            rope.pop(name, None)
    rope["rope_theta"] = said.get("rope.freq_base", 10000.0)
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", 0)) or 1.0
    kind = said.get("rope.scaling.type", "linear")
    if rope["rope_type"] in ("linear", "yarn", "default"):
        rope["rope_type"] = "default" if kind == "none" or factor == 1 != kind else kind
        if kind == "linear" and factor == 1:
            rope["rope_type"] = "default"
        if rope["rope_type"] != "default":
            rope["factor"] = float(factor)
    if rope["rope_type"] == "yarn":
        length = said.get("rope.scaling.original_context_length", said["context_length"])
        rope["original_max_position_embeddings"] = length
        for name in ("beta_fast", "beta_slow", "attn_factor", "log_multiplier"):
            if given := said.get(f"rope.scaling.yarn_{name}"):
                renamed = {"attn_factor": "attention_factor", "log_multiplier": "mscale_all_dim"}
                rope[renamed.get(name, name)] = float(given)
        if "mscale_all_dim" in rope:
            rope["mscale"] = 1.0
    if "full_attention" not in whole:
        return {"rope_parameters": rope}
    near = {**whole["sliding_attention"]}
    near["rope_theta"] = said.get("rope.freq_base_swa", 10000.0)
    return {"rope_parameters": {**whole, "full_attention": rope, "sliding_attention": near}}


def folder_logits(case: str, values: Values) -> Tensor | None:
    """The logits of the same weights with other settings; None if there can't be such a model."""
    try:
        module = AutoModelForCausalLM.from_config(config_of(case, **values)).eval()
        state = base_of(case).module.state_dict()
        if module.load_state_dict(state, strict=False).missing_keys:
            return None
        return logits_of(module)
    except Exception:  # whatever transformers raises for odd values
        return None


def outcome(case: str, change: Change) -> str:
    """`used`, `refused`, or `no effect`; raises AssertionError if the key was dropped."""
    base = base_of(case)
    full = f"{base.architecture}.{change.key}"
    metadata = {key: one for key, one in base.file.metadata.items() if key != full}
    if change.value is not ...:
        metadata[full] = change.value
    file = GgufFile(metadata, base.file.tensors)
    try:
        refuse_unsupported(file)
        found = logits_of(load_module(file, torch.float32).eval())
    except ModelError as error:
        text = str(error)
        one_of_the_header = rf"the GGUF file('s| has no) {base.architecture}\.[\w.]+"
        is_named = full in text or re.search(f"{TENSOR}|{one_of_the_header}", text)
        assert is_named, f"{case} {change}: not named: {text}"
        assert "\n" not in text
        is_sound = type(change.value) is float and 1 < change.value < 1e6
        if is_sound and change.key.endswith(OFTEN_USED) and full in text:
            values = config_values(case, change, file.settings)
            assert values is None or folder_logits(case, values) is None, f"{case}: {text}"
        return "refused"
    is_same = torch.equal(found, base.logits)
    if change.key.startswith("attention.value_length") or change == (change.key, ...):
        assert is_same or change.key in {*DEFAULTS} | {
            key for key in base.file.settings if key.startswith("rope.")
        }, f"{case} {change}"
    values = config_values(case, change, file.settings)
    if values is None:
        is_neutral = change.value in NEUTRAL.get(change.key, ())
        is_harmless = change.key in HARMLESS or change.value is ...
        is_harmless = is_harmless or change.value == base.file.settings.get(change.key, ())
        assert is_same, f"{case} {change}: changes logits, and the oracle does not know it"
        assert is_neutral or is_harmless, f"{case} {change}: dropped"
        return "no effect"
    wanted = folder_logits(case, values)
    assert wanted is not None, f"{case} {change}: read, but no folder can say {values}"
    torch.testing.assert_close(
        found, wanted, rtol=1e-4, atol=1e-4, msg=lambda text: f"{case} {change} {values}: {text}"
    )
    return "no effect" if is_same else "used"


def test_each_key_of_a_header_is_used_or_refused_or_without_effect() -> None:
    seen: Counter[str] = Counter()

    def act(random: Random) -> None:
        case = random.choice(CASES)
        change = change_of(random, base_of(case))
        try:
            seen[outcome(case, change)] += 1
        except ModelError as error:  # in the way to an outcome, and not by the header
            raise AssertionError(f"{case} {change}: {error}") from error

    for case in CASES:
        base_of(case)
    assert outcome("gemma3-long", Change("rope.scaling.type", "yarn")) == "used"  # once a KeyError
    attack(act, 40, seconds=60)
    print(dict(seen))  # noqa: T201
    assert seen["used"]
    assert seen["refused"]
