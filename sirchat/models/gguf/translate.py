"""Translates a GGUF file to transformers: its config's values, and the names of its tensors.

An unknown setting or tensor that would change results is refused by name; nothing is ignored.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import ModelError, format_value
from sirchat.models.gguf.header import BLOCKS, GgufFile, is_count
from sirchat.models.model_config import ORIGINAL_LENGTH, ConfigValues

SAMPLING = "general.sampling."  # of keys that say how replies are drawn
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

# Header keys with one value for each layer, or one value for all sliding-window layers.
_PER_LAYER_KEYS = (
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
    "feed_forward_length",
    "rope.dimension_count_swa",
)
# How keys begin that are of images or sound, or the same for each token of a text.
_MEDIA_PREFIXES = ("vision", "image_", "audio.", "mm.", "mrope_", "rope.mrope_")
_EXPERT_KEYS = ("expert_used_count", "expert_count", "expert_feed_forward_length")

# Of what a tokenizer's metadata are, by the ends of their keys: texts, or lists of these.
_TEXT_KEYS = ("ggml.model", "ggml.pre", "chat_template")
_ITEM_TYPES: dict[str, Any] = {"tokens": str, "merges": str, "token_type": int}
_ITEM_TYPES["scores"] = int | float

_SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_window",
}


# What llama.cpp's converter does to a tensor; loading a GGUF file undoes this change.
Conversion = Literal[
    # The rows of each head are in rotary pairs, not in two halves.
    "query pairs",
    "key pairs",
    # 1 is added to the weights.
    "plus one",
    # One tensor has these matrices of all experts; transformers joins gate and up.
    "gate",
    "up",
    "down",
    # Each expert's matrices are joined, too: the rows of gate, then those of up.
    "gate and up",
    # The value heads that share a key head are not neighbours. A value head is in the last rows, in
    # rows, in columns, or has one row.
    "qkv values",
    "value rows",
    "value columns",
    "head rows",
    # -exp(x) for the weights x, in the order of `head rows`.
    "minus exp",
]


# RoPE settings of all models since Llama 3.1. A GGUF file has only a tensor computed from them.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL_LENGTH: 8192,
}
# What each kind of scaling takes from the header's keys `rope.scaling.*`, by transformers' names.
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "longrope": {"attn_factor": "attention_factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": ORIGINAL_LENGTH,
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


@dataclass(frozen=True)
class Architecture:
    """How to read a GGUF file of one architecture; tables map the file's names to others."""

    # The same architecture in transformers.
    model_type: str
    # The parts of a layer, by their names in transformers. `.weight` or `.bias` is added to both
    # names, unless the key is a tensor's whole name.
    layer_parts: Mapping[str, str]
    # The same for the parts outside the layers.
    outside_parts: Mapping[str, str]
    # Header keys and their config values; `a.b`: b in the object a. Those in `config_names` must be
    # there.
    config_names: Mapping[str, str] = field(default_factory=dict)
    optional_names: Mapping[str, str] = field(default_factory=dict)
    # Those of them that may be 0.
    may_be_zero: Sequence[str] = ()
    # Header keys whose value must be one of a few.
    allowed_values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # Other header keys, which change nothing only if they have one of these values.
    neutral_values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # Config values that are one header value divided by another.
    ratios: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Tensors that have numbers for the config instead of weights.
    config_tensors: Mapping[str, str] = field(default_factory=dict)
    # The tensor by which the frequencies of RoPE are divided, as in Llama 3.1.
    rope_divisors: str = ""
    # Header keys that change no logit, whatever their value is.
    ignored_keys: Sequence[str] = ()
    # Other header keys that must be there.
    required_keys: Sequence[str] = ()
    # Config values that the header lacks, because they are the same for all models.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Config values that say whether the file has a tensor whose name ends so.
    tensor_flags: Mapping[str, str] = field(default_factory=dict)
    # What the converter does to some tensors, by their whole name or without `.weight` or `.bias`.
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    # The header key with the number of last layers that only predict further tokens (multi-token
    # prediction); these are not read.
    prediction_layers_key: str = ""
    # Whether only the first `rope.dimension_count` numbers of a head may rotate.
    rotates_partly: bool = False
    # The kind of the layers without key heads, in a file that lists each layer's key heads.
    state_layer_type: str = ""
    # Whether sliding-window layers have other sizes than the rest. The file then lists the sizes of
    # each layer, and some layers use the keys and values of others.
    has_sizes_by_layer: bool = False
    # Where the config has how RoPE is scaled for long texts; empty if that is not supported.
    rope_config: str = "rope_parameters"
    # A model of so many layers scales attention by the hidden size per head, not by `head_dim`.
    layers_scaled_by_hidden: int = 0
    # Whether transformers has the experts' matrices transposed, with gate and up rows alternating.
    transposes_experts: bool = False


@cache
def architectures() -> dict[str, Architecture]:
    """For each architecture that sirchat reads, by its name in GGUF files: how to read it."""
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    tables = {**listed["groups"], **listed["architectures"]}

    def merged(name: str) -> dict[str, Any]:
        own = dict(tables[name])
        found = dict[str, Any]()
        for part in (*map(merged, own.pop("uses", ())), own):
            for key, value in part.items():
                if isinstance(value, dict):
                    found[key] = found.get(key, {}) | value
                else:
                    found[key] = found.get(key, []) + value if isinstance(value, list) else value
        return found

    return {name: Architecture(**merged(name)) for name in listed["architectures"]}


class Target(NamedTuple):
    """A GGUF tensor's place in the transformers model, and how the converter changed it."""

    name: str  # in transformers; empty for a tensor that is not a weight of the model
    conversion: Conversion | None = None


def refuse_unsupported(file: GgufFile) -> None:
    """Raise ModelError that names the first setting or tensor that can't be used, if any."""
    config_values(file)
    for name, tensor in file.tensors.items():
        find_target(name, file)
        if tensor.type not in BLOCKS:
            raise ModelError(
                f"the GGUF file's {name} is of {tensor.type}, which is unknown here",
                hint="choose a file of another type, such as Q4_K_M or Q8_0",
            )


def set_sampling(module: Any, metadata: Mapping[str, Any]) -> None:
    """Set a module's sampling defaults in its generation config, if the GGUF header has some."""
    found = ((name, metadata.get(f"{SAMPLING}{key}")) for key, name in _SAMPLING_NAMES.items())
    settings = {
        name: round(value, 6)  # from float32
        for name, value in found
        if isinstance(value, int | float)
    }
    if settings:
        if module.generation_config is module.config:
            module.generation_config = ConfigValues(module.config.to_dict())
        module.generation_config.update(do_sample=settings.get("temperature") != 0, **settings)


def has_blocks(file: GgufFile) -> bool:
    """Whether a GGUF file stores any weights in blocks of few bits, not as plain floats."""
    return any(BLOCKS[tensor.type][1] > 1 for tensor in file.tensors.values())


def config_values(file: GgufFile) -> dict[str, Any]:
    """The values of transformers' config for a GGUF file.

    Raises ModelError that names the setting if one is missing or can't be used.
    """
    arch, settings = _find_architecture(file), file.settings
    _refuse_odd_tokenizer(file.metadata)
    for key in (*arch.required_keys, *arch.config_names):
        file.require(key in settings, key)
    has_expert_size = "expert_feed_forward_length" in {**arch.config_names, **settings}
    if arch.has_sizes_by_layer or not has_expert_size:
        file.require("feed_forward_length" in settings, "feed_forward_length")
    values: dict[str, Any] = {"model_type": arch.model_type, "rope_theta": 10_000.0}
    values |= arch.constants
    _add_settings(values, file, arch)
    if arch.has_sizes_by_layer:
        _add_sizes_by_layer(values, file)
    else:
        _add_head_size(values, file, arch)
    add_rope_scaling(values, file, arch)
    for layer in range(values["num_hidden_layers"], settings["block_count"]):
        predicts_more = any(name.startswith(f"blk.{layer}.nextn.") for name in file.tensors)
        file.require(predicts_more, arch.prediction_layers_key)
    values.setdefault("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())))
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for config_name, end in arch.tensor_flags.items():
        values[config_name] = any(name.endswith(end) for name in file.tensors)
    for long, short in _SPECIAL_TOKENS.items():
        values[f"{short}_token_id"] = file.metadata.get(f"tokenizer.ggml.{long}_token_id")
    return _nest_names(values)


def find_target(name: str, file: GgufFile) -> Target:
    """Find where a tensor goes in the transformers model; `Target("")` if it is not used.

    Raises ModelError if the name is unknown.
    """
    arch = architectures()[file.architecture]
    match = re.match(r"blk\.(\d{1,9})\.", name)
    part = name[match.end() :] if match else name
    if _is_unused(name, part, int(match[1]) if match else None, file, arch):
        return Target("")
    names = arch.layer_parts if match else arch.outside_parts
    stem, _, kind = part.rpartition(".")
    target = names.get(part)
    if target is None and kind in ("weight", "bias") and stem in names:
        target = f"{names[stem]}.{kind}"
    if target is None:
        raise ModelError(f"the GGUF file has {name}, which models of {file.architecture} lack here")
    conversion = arch.conversions.get(part, arch.conversions.get(stem))
    return Target(f"model.layers.{match[1]}.{target}" if match else target, conversion)


def _is_unused(name: str, part: str, layer: int | None, file: GgufFile, arch: Architecture) -> bool:
    """Whether a tensor is no weight in use: it has config values, or belongs to an unused layer."""
    if name in arch.config_tensors or name == arch.rope_divisors:
        return True
    if layer is None:
        return False
    settings = file.settings
    if settings.get(arch.prediction_layers_key) and layer >= _count_layers(file, arch):
        return True
    if arch.has_sizes_by_layer and part.startswith(("attn_k", "attn_v")):  # it uses another's
        shared = settings.get("attention.shared_kv_layers", 0)
        return layer >= _count_layers(file, arch) - int(shared)
    return False


def _find_architecture(file: GgufFile) -> Architecture:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        what = "a LoRA adapter" if kind == "adapter" else f"of the type {format_value(kind)}"
        raise ModelError(f"this GGUF file is {what}, not a model")
    if file.architecture not in architectures():
        raise ModelError(
            f"GGUF files of the architecture {format_value(file.architecture)} can't be read",
            hint=f"readable: {', '.join(architectures())}; others only from safetensors",
        )
    return architectures()[file.architecture]


def _refuse_odd_tokenizer(metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        item, rule = _ITEM_TYPES.get(key.removeprefix("tokenizer.ggml.")), ""
        is_list = isinstance(value, list) and all(isinstance(x, item or str) for x in value[:1])
        if item is not None and not is_list:
            rule = f"a list of {'texts' if item is str else 'numbers'}"
        elif key.endswith(_TEXT_KEYS) and not isinstance(value, str):
            rule = "a text"
        elif key.endswith("_token_id") and type(value) is not int:
            rule = "a whole number"
        if rule:
            raise ModelError(f"the GGUF file's {key} is {format_value(value)}, must be {rule}")


def _add_settings(values: dict[str, Any], file: GgufFile, arch: Architecture) -> None:
    layers = _count_layers(file, arch)
    names = {**arch.optional_names, **arch.config_names}
    read_elsewhere = (
        *("attention.value_length", "rope.dimension_count", arch.prediction_layers_key),
        *(_PER_LAYER_KEYS if arch.has_sizes_by_layer else ()),  # by `_add_sizes_by_layer`
    )
    no_effect = {*SCALING_KEYS, *arch.ignored_keys}
    for key, value in file.settings.items():
        if key in arch.allowed_values:
            allowed = arch.allowed_values[key]
            is_allowed = value in allowed and type(value) is type(allowed[0])
            file.require(is_allowed, key, " or ".join(map(str, allowed)))
        elif key == "attention.head_count_kv" and arch.state_layer_type:
            _add_layer_types(values, file, arch)
        elif key == "attention.recurrent_layers" and arch.prediction_layers_key:
            _check_recurrent_layers(file, arch)
        elif key in read_elsewhere:
            continue
        elif key in names:
            values[names[key]] = _read_number(file, key, key in arch.may_be_zero)
        elif key not in no_effect and not key.startswith(_MEDIA_PREFIXES):
            file.require(value in arch.neutral_values.get(key, ()), key)
    for name, (dividend, divisor) in arch.ratios.items():
        values[name], rest = divmod(file.number(dividend), file.number(divisor))
        file.require(rest == 0, dividend, f"a multiple of {divisor}")
    used, experts = (values.get(names.get(key, ""), 0) for key in _EXPERT_KEYS[:2])
    file.require(used <= experts, "expert_used_count", "at most expert_count")
    values["num_hidden_layers"] = layers


def _add_layer_types(values: dict[str, Any], file: GgufFile, arch: Architecture) -> None:
    key, heads = "attention.head_count_kv", file.settings["attention.head_count_kv"]
    is_list = isinstance(heads, list) and len(heads) == _count_layers(file, arch) and any(heads)
    file.require(is_list and all(map(is_count, heads)), key, "a number for each layer")
    values["layer_types"] = ["full_attention" if n else arch.state_layer_type for n in heads]
    values["num_key_value_heads"] = max(heads)


def _check_recurrent_layers(file: GgufFile, arch: Architecture) -> None:
    interval, layers = file.number("full_attention_interval"), _count_layers(file, arch)
    every = range(file.settings["block_count"])
    expected = [index < layers and index % interval < interval - 1 for index in every]
    key = "attention.recurrent_layers"
    file.require(file.settings[key] == expected, key, "true but for each interval's last layer")


def _read_number(file: GgufFile, key: str, may_be_zero: bool) -> float | None:
    """A setting that is a number; None if it is 0 and so switches a feature off."""
    number = file.number(key, may_be_zero=may_be_zero)
    if not number and key.endswith(("softcapping", "sliding_window")):
        return None
    # A larger size would make a model that is too large for any memory.
    is_size = type(number) is int and not key.endswith(("context_length", "sliding_window"))
    file.require(not is_size or number <= file.largest_dimension, key, "the size of a tensor")
    return number


def _count_layers(file: GgufFile, arch: Architecture) -> int:
    """The number of layers, without those that only predict further tokens."""
    key, layers = arch.prediction_layers_key, file.settings["block_count"]
    extra, is_valid = file.settings.get(key, 0), is_count(layers) and layers > 0
    file.require(is_valid and layers <= len(file.tensors), "block_count", "how many there are")
    file.require(is_count(extra) and extra < layers, key, "less than block_count")
    return int(layers - extra)


def _add_head_size(values: dict[str, Any], file: GgufFile, arch: Architecture) -> None:
    """Add the values that depend on the size of a head and of its rotated part."""
    settings, hidden, heads = file.settings, values["hidden_size"], values["num_attention_heads"]
    if "attention.head_count_kv" not in settings:
        values["num_key_value_heads"] = heads
    key_heads = values["num_key_value_heads"]
    file.require(
        heads % key_heads == 0, "attention.head_count_kv", f"a divisor of {heads}, the heads"
    )
    rotated, average = settings.get("rope.dimension_count"), hidden // heads
    is_llama = arch.model_type == "llama" and is_count(rotated)
    size = values.setdefault("head_dim", rotated if rotated and is_llama else average)
    is_part = arch.rotates_partly and is_count(rotated) and rotated in range(2, size, 2)
    file.require(is_part or rotated in (None, size), "rope.dimension_count", f"{size}")
    length = settings.get("attention.value_length", size)
    file.require(length == size, "attention.value_length", f"{size}")
    if arch.rotates_partly:
        values["partial_rotary_factor"] = (rotated or size) / size
    if arch.layers_scaled_by_hidden:
        is_wide = values["num_hidden_layers"] == arch.layers_scaled_by_hidden
        values["query_pre_attn_scalar"] = average if is_wide else size


def _add_sizes_by_layer(values: dict[str, Any], file: GgufFile) -> None:
    settings, layers = file.settings, values["num_hidden_layers"]
    slides = settings["attention.sliding_window_pattern"]
    is_pattern = isinstance(slides, list) and len(slides) == layers and slides[-1] is False
    file.require(is_pattern, "attention.sliding_window_pattern", "false for the last layer")
    values["layer_types"] = ["sliding_attention" if x else "full_attention" for x in slides]
    _add_mlp_sizes(values, file, slides)
    _add_key_heads(values, file, slides)
    embeddings = file.tensors.get("per_layer_token_embd.weight")
    values["vocab_size_per_layer_input"] = (
        values.get("vocab_size", 0) if embeddings is None else embeddings.shape[0]
    )
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        for key in _EXPERT_KEYS:
            file.require(bool(settings.get(key)), key)
    for key in ("rope.dimension_count", "attention.value_length"):
        for suffix, size in (("", values["global_head_dim"]), ("_swa", values["head_dim"])):
            file.require(settings.get(key + suffix, size) == size, key + suffix, f"{size}")
    add_rotated_fraction(values, file, values["global_head_dim"])


def _add_mlp_sizes(values: dict[str, Any], file: GgufFile, slides: list[bool]) -> None:
    """Add the MLP's size; it may be doubled in layers that share another layer's keys."""
    layers, shared = len(slides), file.settings["attention.shared_kv_layers"]
    can_share = is_count(shared) and set(slides[: max(0, layers - shared)]) == set(slides)
    file.require(can_share, "attention.shared_kv_layers", "less, so that each kind has keys")
    sizes = _numbers_by_layer(values, file, "feed_forward_length")
    first = sizes[0]
    doubled = [first] * (layers - shared) + [2 * first] * shared
    file.require(sizes in (doubled, [first] * layers), "feed_forward_length")
    values |= {"intermediate_size": first, "use_double_wide_mlp": sizes == doubled}


def _add_key_heads(values: dict[str, Any], file: GgufFile, slides: list[bool]) -> None:
    """Add the number of key heads in sliding-window layers and in the others (`global`)."""
    key = "attention.head_count_kv"
    heads = _numbers_by_layer(values, file, key)
    others = heads[-1]
    sliding = heads[slides.index(True)] if True in slides else others
    has_no_values = f"blk.{slides.index(False)}.attn_v.weight" not in file.tensors
    is_even = heads == [sliding if slide else others for slide in slides]
    file.require(is_even and (sliding == others or has_no_values), key)
    values |= {"num_key_value_heads": sliding, "num_global_key_value_heads": others}
    values["attention_k_eq_v"] = has_no_values


def _numbers_by_layer(values: Mapping[str, Any], file: GgufFile, key: str) -> list[int]:
    """A setting's number for each layer; a single number in the header holds for all layers."""
    layers = values["num_hidden_layers"]
    setting = file.settings.get(key, values["num_attention_heads"])
    numbers = setting if isinstance(setting, list) else [setting] * layers
    are_sizes = all(is_count(n) and 0 < n <= file.largest_dimension for n in numbers)
    file.require(are_sizes and len(numbers) == layers, key, "a number, or one for each layer")
    return numbers


def _nest_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted names: `a.b` becomes the key b of the dictionary a."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = out
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return out


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
        defaults = {"factor": 1.0, ORIGINAL_LENGTH: settings["context_length"]}
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
