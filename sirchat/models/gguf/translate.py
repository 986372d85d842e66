"""Translates a GGUF file to transformers: its config's values, and the names of its tensors.

What changes a number and is not known here is refused by its name; nothing is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sirchat.errors import ModelError, format_value
from sirchat.models.gguf.architectures import (
    ARCHITECTURES,
    CONFIG_NAMES,
    IGNORED_KEYS,
    NEUTRAL_VALUES,
    REQUIRED_KEYS,
    Architecture,
    Change,
)
from sirchat.models.gguf.header import BLOCKS, GgufFile, is_count
from sirchat.models.gguf.rotation import SCALING, add_rope_scaling, add_rotated_fraction
from sirchat.models.model_config import ConfigValues

SAMPLING = "general.sampling."  # of keys that say how replies are drawn
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

# Header keys with one value for each layer, or one value for all sliding-window layers.
_BY_LAYER = (
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
    "feed_forward_length",
    "rope.dimension_count_swa",
)
# How keys begin that are of images or sound, or the same for each token of a text.
_OF_OTHER_PARTS = ("vision", "image_", "audio.", "mm.", "mrope_", "rope.mrope_")
_OF_EXPERTS = ("expert_used_count", "expert_count", "expert_feed_forward_length")

# Of what a tokenizer's metadata are, by the ends of their keys: texts, or lists of these.
_TEXTS = ("ggml.model", "ggml.pre", "chat_template")
_LISTS: dict[str, Any] = {"tokens": str, "merges": str, "token_type": int, "scores": int | float}

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_window",
}


class Target(NamedTuple):
    """Where a tensor of a GGUF file goes in the transformers model, and how it was changed."""

    name: str  # in transformers; empty for a tensor that is not a weight of the model
    change: Change | None = None


def refuse_unsupported(file: GgufFile) -> None:
    """Raise ModelError if a setting or a tensor of a GGUF file can't be used; it is named."""
    config_values(file)
    for name, tensor in file.tensors.items():
        find_target(name, file)
        if tensor.type not in BLOCKS:
            raise ModelError(
                f"the GGUF file's {name} is of {tensor.type}, which is unknown here",
                hint="choose a file of another type, such as Q4_K_M or Q8_0",
            )


def set_sampling(module: Any, metadata: Mapping[str, Any]) -> None:
    """Let a module's generation config say how the model draws, if the GGUF file's header does."""
    given = ((name, metadata.get(f"{SAMPLING}{key}")) for key, name in _SAMPLING.items())
    numbers = {name: value for name, value in given if isinstance(value, int | float)}
    said = {name: round(value, 6) for name, value in numbers.items()}  # from float32
    if said:
        if module.generation_config is module.config:
            module.generation_config = ConfigValues(module.config.to_dict())
        module.generation_config.update(do_sample=said.get("temperature") != 0, **said)


def has_blocks(file: GgufFile) -> bool:
    """Whether a GGUF file stores any weights in blocks of few bits, not as plain floats."""
    return any(BLOCKS[tensor.type][1] > 1 for tensor in file.tensors.values())


def config_values(file: GgufFile) -> dict[str, Any]:
    """The values of transformers' config for a GGUF file.

    Raises ModelError for a setting that is missing or can't be used; the message names it.
    """
    known, said = _architecture(file), file.settings
    _refuse_odd_tokenizer(file.metadata)
    needed = [*REQUIRED_KEYS, "attention.layer_norm_rms_epsilon", *known.sizes, *known.needed]
    if known.varies_by_layer or "expert_feed_forward_length" not in {**known.sizes, **said}:
        needed.append("feed_forward_length")
    for key in needed:
        file.require(key in said, key)
    values: dict[str, Any] = {"model_type": known.model_type, "rope_theta": 10_000.0, **known.fixed}
    _add_said(values, file, known)
    if known.varies_by_layer:
        _add_sizes_by_layer(values, file)
    else:
        _add_head_size(values, file, known)
    add_rope_scaling(values, file, known)
    for at in range(values["num_hidden_layers"], said["block_count"]):
        predicts_more = any(name.startswith(f"blk.{at}.nextn.") for name in file.tensors)
        file.require(predicts_more, known.extra_layers)
    values.setdefault("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())))
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for config_name, end in known.flags.items():
        values[config_name] = any(name.endswith(end) for name in file.tensors)
    for long, short in _SPECIAL.items():
        values[f"{short}_token_id"] = file.metadata.get(f"tokenizer.ggml.{long}_token_id")
    return _nested(values)


def find_target(name: str, file: GgufFile) -> Target:
    """Find where a tensor goes in the transformers model; raises ModelError if it is unknown."""
    known = ARCHITECTURES[file.architecture]
    if name in known.lists or name == known.slowed:
        return Target("")
    layer = re.match(r"blk\.(\d{1,9})\.", name)
    extra = file.settings.get(known.extra_layers)
    if layer and extra and int(layer[1]) >= _count_layers(file, known):
        return Target("")
    if layer and known.varies_by_layer and name[layer.end() :].startswith(("attn_k", "attn_v")):
        shared = file.settings.get("attention.shared_kv_layers", 0)
        if int(layer[1]) >= _count_layers(file, known) - shared:
            return Target("")  # it uses the keys and values of another layer
    rest = name[layer.end() :] if layer else name
    names = known.layer if layer else known.outer
    part, _, kind = rest.rpartition(".")
    inner = names.get(rest)
    if inner == "":
        return Target("")
    if inner is None and kind in ("weight", "bias") and part in names:
        inner = f"{names[part]}.{kind}"
    if inner is None:
        raise ModelError(f"the GGUF file has {name}, which models of {file.architecture} lack here")
    change = known.changes.get(rest, known.changes.get(part))
    return Target(f"model.layers.{layer[1]}.{inner}" if layer else inner, change)


def _architecture(file: GgufFile) -> Architecture:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        what = "a LoRA adapter" if kind == "adapter" else f"of the type {format_value(kind)}"
        raise ModelError(f"this GGUF file is {what}, not a model")
    if file.architecture not in ARCHITECTURES:
        raise ModelError(
            f"GGUF files of the architecture {format_value(file.architecture)} can't be read",
            hint=f"readable: {', '.join(ARCHITECTURES)}; others only from safetensors",
        )
    return ARCHITECTURES[file.architecture]


def _refuse_odd_tokenizer(metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        of, what = _LISTS.get(key.removeprefix("tokenizer.ggml.")), ""
        are_right = isinstance(value, list) and all(isinstance(one, of or str) for one in value[:1])
        if of is not None and not are_right:
            what = f"a list of {'texts' if of is str else 'numbers'}"
        elif key.endswith(_TEXTS) and not isinstance(value, str):
            what = "a text"
        elif key.endswith("_token_id") and type(value) is not int:
            what = "a whole number"
        if what:
            raise ModelError(f"the GGUF file's {key} is {format_value(value)}, must be {what}")


def _add_said(values: dict[str, Any], file: GgufFile, known: Architecture) -> None:
    """Add the header's settings to the config's `values`."""
    sizes, layers = {**CONFIG_NAMES, **known.sizes, **known.optional}, _count_layers(file, known)
    read_elsewhere = ("attention.value_length", "rope.dimension_count", known.extra_layers)
    no_effect = {*read_elsewhere, *SCALING, *known.ignored, *IGNORED_KEYS}
    for key, value in file.settings.items():
        if key in known.choices:
            allowed = known.choices[key]
            is_one = value in allowed and type(value) is type(allowed[0])
            file.require(is_one, key, " or ".join(map(str, allowed)))
        elif key == "attention.head_count_kv" and known.state_kind:
            is_list = isinstance(value, list) and len(value) == layers and any(value)
            file.require(is_list and all(map(is_count, value)), key, "a number for each layer")
            values["layer_types"] = ["full_attention" if n else known.state_kind for n in value]
            values[sizes[key]] = max(value)
        elif key == "attention.recurrent_layers" and known.extra_layers:
            interval, every = file.number("full_attention_interval"), file.settings["block_count"]
            wanted = [at < layers and at % interval < interval - 1 for at in range(every)]
            file.require(value == wanted, key, "true but for each interval's last layer")
        elif known.varies_by_layer and key in _BY_LAYER:
            continue  # `_add_sizes_by_layer` adds it
        elif key in sizes:
            values[sizes[key]] = number = file.number(key, may_be_0=key in known.may_be_0)
            # Else a model would be made that is too large for any memory.
            is_length = key.endswith(("context_length", "sliding_window"))
            is_size = type(number) is int and not is_length
            file.require(not is_size or number <= file.largest, key, "the size of a tensor")
            if not number and key.endswith(("softcapping", "sliding_window")):
                values[sizes[key]] = None
        elif key not in no_effect and not key.startswith(_OF_OTHER_PARTS):
            file.require(value in NEUTRAL_VALUES.get(key, ()), key)
    for name, (over, under) in known.ratios.items():
        values[name], rest = divmod(file.number(over), file.number(under))
        file.require(rest == 0, over, f"a multiple of {under}")
    used, experts = (values.get(sizes.get(key, ""), 0) for key in _OF_EXPERTS[:2])
    file.require(used <= experts, "expert_used_count", "at most expert_count")
    values["num_hidden_layers"] = layers


def _count_layers(file: GgufFile, known: Architecture) -> int:
    """The number of layers, without those that only predict further tokens."""
    layers, extra = file.settings["block_count"], file.settings.get(known.extra_layers, 0)
    file.require(
        is_count(layers) and 0 < layers <= len(file.tensors), "block_count", "how many there are"
    )
    file.require(is_count(extra) and extra < layers, known.extra_layers, "less than block_count")
    return int(layers - extra)


def _add_head_size(values: dict[str, Any], file: GgufFile, known: Architecture) -> None:
    """Add what depends on the size of a head and its rotated part."""
    said, hidden, heads = file.settings, values["hidden_size"], values["num_attention_heads"]
    if "attention.head_count_kv" not in said:
        values["num_key_value_heads"] = heads
    of_keys = values["num_key_value_heads"]
    file.require(
        heads % of_keys == 0, "attention.head_count_kv", f"a divisor of {heads}, the heads"
    )
    rotated, average = said.get("rope.dimension_count"), hidden // heads
    is_llama = known.model_type == "llama" and is_count(rotated)
    size = values.setdefault("head_dim", rotated if rotated and is_llama else average)
    is_part = known.part_rotates and is_count(rotated) and rotated in range(2, size, 2)
    file.require(is_part or rotated in (None, size), "rope.dimension_count", f"{size}")
    length = said.get("attention.value_length", size)
    file.require(length == size, "attention.value_length", f"{size}")
    if known.part_rotates:
        values["partial_rotary_factor"] = (rotated or size) / size
    if known.wide_layers:
        is_wide = values["num_hidden_layers"] == known.wide_layers
        values["query_pre_attn_scalar"] = average if is_wide else size


def _add_sizes_by_layer(values: dict[str, Any], file: GgufFile) -> None:
    """Add Gemma 4's config values for the sizes of each layer."""
    said, layers = file.settings, values["num_hidden_layers"]
    slides, shared = said["attention.sliding_window_pattern"], said["attention.shared_kv_layers"]
    is_pattern = isinstance(slides, list) and len(slides) == layers and slides[-1] is False
    file.require(is_pattern, "attention.sliding_window_pattern", "false for the last layer")
    values["layer_types"] = ["sliding_attention" if n else "full_attention" for n in slides]
    shares = is_count(shared) and set(slides[: max(0, layers - shared)]) == set(slides)
    file.require(shares, "attention.shared_kv_layers", "less, so that each kind has keys")
    by_layer = []
    for key in ("feed_forward_length", "attention.head_count_kv"):
        given = said.get(key, values["num_attention_heads"])
        numbers = given if isinstance(given, list) else [given] * layers
        are_sizes = all(is_count(n) and 0 < n <= file.largest for n in numbers)
        file.require(are_sizes and len(numbers) == layers, key, "a number, or one for each layer")
        by_layer.append(numbers)
    widths, counts = by_layer
    wide = [widths[0]] * (layers - shared) + [2 * widths[0]] * shared
    near = next((n for n, does in zip(counts, slides, strict=True) if does), counts[-1])
    values |= {"intermediate_size": widths[0], "use_double_wide_mlp": widths == wide}
    values |= {"num_key_value_heads": near, "num_global_key_value_heads": counts[-1]}
    values["attention_k_eq_v"] = f"blk.{slides.index(False)}.attn_v.weight" not in file.tensors
    values["vocab_size_per_layer_input"] = values.get("vocab_size", 0)
    rows = file.tensors.get("per_layer_token_embd.weight")
    if rows is not None:
        values["vocab_size_per_layer_input"] = rows.shape[0]
    file.require(widths in (wide, [widths[0]] * layers), "feed_forward_length")
    is_even = counts == [near if does else counts[-1] for does in slides]
    is_even = is_even and (near == counts[-1] or values["attention_k_eq_v"])
    file.require(is_even, "attention.head_count_kv")
    for key in _OF_EXPERTS if "blk.0.ffn_gate_inp.weight" in file.tensors else ():
        file.require(bool(said.get(key)), key)
    for key in ("rope.dimension_count", "attention.value_length"):
        for end, size in (("", values["global_head_dim"]), ("_swa", values["head_dim"])):
            file.require(said.get(key + end, size) == size, key + end, f"{size}")
    add_rotated_fraction(values, file, values["global_head_dim"])


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted names: `a.b` becomes the key b of the dictionary a."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = out
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return out
