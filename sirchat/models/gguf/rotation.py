"""How a GGUF file scales the rotation (RoPE): by keys of its header, or by tensors with factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import ModelError
from sirchat.models.gguf.architectures import Architecture
from sirchat.models.gguf.header import GgufFile

# RoPE settings of all models since Llama 3.1. A GGUF file has only a tensor computed from them.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# What each kind of scaling takes from the header's keys `rope.scaling.*`, by transformers' names.
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "longrope": {"attn_factor": "attention_factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": _ORIGINAL_LENGTH,
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
# Values with which keys that are not used mean nothing; the others have no effect then.
_NEUTRAL_VALUES = {
    "factor": (0, 1),
    **dict.fromkeys(("attn_factor", "yarn_attn_factor"), (1,)),
    **dict.fromkeys(("alpha", "yarn_log_multiplier"), (0,)),
    "yarn_ext_factor": (-1,),
}
_NAMES = ("type", "finetuned", *_NEUTRAL_VALUES, *_PARAMETERS["yarn"])
SCALING_KEYS = {"rope.scale_linear", *(f"rope.scaling.{name}" for name in _NAMES)}  # all of them


def add_rope_scaling(values: dict[str, Any], file: GgufFile, arch: Architecture) -> None:
    """Add RoPE's scaling to a config's `values`; raises ModelError if it isn't supported."""
    is_long = any(key in file.tensors for key in arch.config_tensors)
    scaling = _read_scaling(file, arch, is_long)
    values |= {f"{arch.rope_config}.{name}": one for name, one in scaling.items()}
    size = values.get("head_dim", 0)
    if is_long:
        half = int(size * values.get("partial_rotary_factor", 1)) // 2
        for key, name in arch.config_tensors.items():
            values[name] = _read_factors(file, key, half).tolist()
        values[f"{arch.rope_config}.rope_type"] = "longrope"
    if arch.rope_divisors not in file.tensors:
        return
    rope_divisors = _read_factors(file, arch.rope_divisors, size // 2)
    factor = float(rope_divisors.max())
    # What Llama 3.1 divides the RoPE frequencies by: 1 for fast ones, `factor` for slow ones.
    wave = 2 * np.pi * values["rope_theta"] ** (np.arange(0, size, 2) / size)  # tokens of a turn
    fast = np.clip((8192 / wave - 1) / (4 - 1), 0, 1)
    expected = 1 / ((1 - fast) / max(factor, 1) + fast)
    if scaling or not np.allclose(rope_divisors, expected, rtol=1e-4):
        problem = f"does not go with its {file.architecture}.rope keys"
        raise ModelError(
            f"the GGUF file's {arch.rope_divisors} {problem}",
            hint="it must be that of Llama 3.1, without another scaling",
        )
    values["rope_parameters"] = {"rope_type": "llama3", "factor": factor, **_LLAMA_3}


def add_rotated_fraction(values: dict[str, Any], file: GgufFile, size: int) -> None:
    """Add the fraction of a head of `size` numbers that rotates, which a Gemma 4 tensor states."""
    # The tensor divides the frequencies of the numbers that do not rotate by more than 1e20.
    numbers = _read_factors(file, "rope_freqs.weight", size // 2)
    count = int((numbers == 1).sum())
    values["rope_parameters.full_attention.partial_rotary_factor"] = 2 * count / size
    if not (numbers[:count] == 1).all() or not (numbers[count:] > 1e20).all():
        raise ModelError("the GGUF file's rope_freqs.weight is not of the kind that Gemma 4 has")


def _read_scaling(file: GgufFile, arch: Architecture, is_long: bool) -> dict[str, Any]:
    """The header's scaling for transformers; `is_long`: the file has factors for long texts."""
    settings, can_scale = file.settings, arch.rope_config and not arch.config_tensors
    kinds = ("longrope",) if is_long else ("linear", "none", *(("yarn",) if can_scale else ()))
    kind = settings.get("rope.scaling.type", kinds[0])
    file.require(kind in kinds, "rope.scaling.type", " or ".join(kinds))
    parameters = _PARAMETERS[kind] if can_scale or is_long else {}
    keys = {name: f"rope.scaling.{name}" for name in {**_NEUTRAL_VALUES, **parameters}}
    if keys["factor"] not in settings:
        keys["factor"] = "rope.scale_linear"
    for name, neutral in _NEUTRAL_VALUES.items():
        value = settings.get(keys[name], neutral[0])
        file.require(name in parameters or value in neutral, keys[name])
    # 0 stands for the default.
    given = {to: keys[name] for name, to in parameters.items() if settings.get(keys[name], 0) != 0}
    scaling = {to: file.number(key) for to, key in given.items()}
    if kind == "none" or (kind == "linear" and scaling.get("factor", 1) == 1):
        return {}
    if kind == "yarn":
        file.require(settings.get("rope.freq_base", 2) > 1, "rope.freq_base", "above 1")
        defaults = {"factor": 1.0, _ORIGINAL_LENGTH: settings["context_length"]}
        scaling = defaults | scaling
    return scaling if is_long else {"rope_type": kind, **scaling}


def _read_factors(file: GgufFile, name: str, count: int) -> NDArray[np.float32]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"the GGUF file has no {name}")
    if tensor.type != "F32" or tensor.shape != (count,):
        shape = f"{tensor.type} {list(tensor.shape)}"
        raise ModelError(f"the GGUF file's {name} is {shape}, must be F32 [{count}]")
    return np.array(tensor.data).view(np.float32)
