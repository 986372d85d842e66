"""Translates a GGUF file to transformers: its config's values, and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import ModelError
from sirchat.models.gguf.architectures import (
    ARCHITECTURES,
    MEANS_NOTHING,
    SIZES,
    Architecture,
    Change,
)
from sirchat.models.gguf.header import BLOCKS, GgufFile, GgufTensor

_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

_MOST = 1 << 40  # values of this size or more count as invalid

# Header keys with one value for each layer, or one value for all sliding-window layers.
_BY_LAYER = (
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
    "feed_forward_length",
    "rope.dimension_count_swa",
)
_OF_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")

# RoPE settings of all models since Llama 3.1. A GGUF file has only a tensor computed from them.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Target(NamedTuple):
    """Where a tensor of a GGUF file goes in the transformers model, and how it was changed."""

    name: str  # in transformers; empty for a tensor that is not a weight of the model
    change: Change | None = None


def is_supported(file: GgufFile) -> bool:
    """Whether sirchat itself can read a GGUF file: its architecture, settings and all tensors."""
    return config_values(file) is not None and all(
        target_of(name, file) is not None and tensor.type in BLOCKS
        for name, tensor in file.tensors.items()
    )


def refuse_misread(file: GgufFile) -> None:
    """Raise ModelError for an unsupported GGUF file that transformers would read wrongly."""
    known = ARCHITECTURES.get(file.architecture)
    if known is None or not known.refusal:
        return
    unknown = next((name for name in file.tensors if target_of(name, file) is None), "")
    if unknown or config_values(file) is None:
        raise ModelError(
            f"this GGUF file of {file.architecture} has {unknown or 'settings'} not known here",
            hint=known.refusal,
        )


def has_blocks(file: GgufFile) -> bool:
    """Whether a GGUF file stores any weights in blocks of few bits, not as plain floats."""
    return any(BLOCKS[tensor.type][1] > 1 for tensor in file.tensors.values())


def config_values(file: GgufFile) -> Mapping[str, Any] | None:
    """The values of transformers' config for a GGUF file; None if a setting is not supported."""
    known, metadata = ARCHITECTURES.get(file.architecture), file.metadata
    if known is None:
        return None
    said = file.settings
    values: dict[str, Any] = {"model_type": known.model_type, "rope_theta": 10_000.0, **known.fixed}
    if any(key not in said for key in (*known.sizes, *known.needed)) or not _add_said(
        values, said, known
    ):
        return None
    if known.varies_by_layer:
        is_understood = _add_sizes_by_layer(values, said, file)
    else:
        is_understood = _add_head_size(values, said, known)
    if not is_understood or not _add_rotation(values, file, known):
        return None
    if known.of_two_norms:
        if values.get("num_attention_heads", 0) % values["num_kv_heads"]:
            return None
        values["num_ln_in_parallel_attn"] = 2 if _has_two_norms(file) else 1
        values["new_decoder_architecture"] = expands_keys(file)
    values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for config_name, end in known.flags.items():
        values[config_name] = any(name.endswith(end) for name in file.tensors)
    for long, short in _SPECIAL.items():
        values[f"{short}_token_id"] = metadata.get(f"tokenizer.ggml.{long}_token_id")
    return _nested(values)


def expands_keys(file: GgufFile) -> bool:
    """Whether the model caches keys for every query head: the larger forms of Falcon do."""
    known = ARCHITECTURES.get(file.architecture)
    if known is None or not known.of_two_norms:
        return False
    return _has_two_norms(file) or file.settings.get("attention.head_count_kv") != 1


def target_of(name: str, file: GgufFile) -> Target | None:
    """Find where a tensor of a GGUF file goes in the transformers model; None if it is unknown."""
    known = ARCHITECTURES[file.architecture]
    if name in known.lists or name == known.slowed:
        return Target("")
    layer = re.match(r"blk\.(\d{1,9})\.", name)
    extra = file.settings.get(known.extra_layers)
    if layer and extra and int(layer[1]) >= _count_layers(file.settings, known):
        return Target("")
    if layer and known.varies_by_layer and name[layer.end() :].startswith(("attn_k", "attn_v")):
        shared = file.settings.get("attention.shared_kv_layers", 0)
        if int(layer[1]) >= _count_layers(file.settings, known) - shared:
            return Target("")  # it uses the keys and values of another layer
    rest = name[layer.end() :] if layer else name
    names = known.layer if layer else known.outer
    if layer and known.of_two_norms and _has_two_norms(file):
        names = {**names, **known.of_two_norms}
    part, dot, kind = rest.rpartition(".")
    inner = names.get(rest)
    if inner == "":
        return Target("")
    if inner is None and kind in ("weight", "bias") and part in names:
        inner = f"{names[part]}.{kind}"
    if inner is None:
        return None
    change = known.changes.get(part if dot else rest)
    return Target(f"{known.layers}.{layer[1]}.{inner}" if layer else inner, change)


def _add_said(values: dict[str, Any], said: Mapping[str, Any], known: Architecture) -> bool:
    """Add the header's settings to the config's `values`; False if one is not supported."""
    sizes = {**SIZES, **known.sizes, **known.optional}
    elsewhere = ("rope.dimension_count", known.extra_layers, *known.ignored, *MEANS_NOTHING)
    for key, value in said.items():
        if key in known.texts:
            name, understood = known.texts[key]
            if value not in understood:
                return False
            if name:
                values[name] = value
        elif key == "attention.head_count_kv" and known.state_kind and isinstance(value, list):
            if not value or not all(
                isinstance(count, int) and 0 <= count < _MOST for count in value
            ):
                return False
            values["layer_types"] = ["full_attention" if n else known.state_kind for n in value]
            values[sizes[key]] = max(value)
        elif key == "attention.sliding_window" and value == 0:  # there is none
            values["sliding_window"] = None
        elif known.varies_by_layer and (key in _BY_LAYER or (value == 0 and key in sizes)):
            values[sizes.get(key, key)] = value  # `_add_sizes_by_layer` converts it
        elif key in sizes:
            if not isinstance(value, int | float) or not 0 < value < _MOST:
                return False  # such as another number of heads in each layer
            values[sizes[key]] = value
        elif key not in elsewhere:
            return False  # such as a scaled rotation
    for name, (over, under) in known.ratios.items():
        if not all(isinstance(said[key], int) and said[key] > 0 for key in (over, under)):
            return False
        values[name] = said[over] // said[under]
    values["num_hidden_layers"] = _count_layers(said, known)
    return True


def _has_two_norms(file: GgufFile) -> bool:
    return "blk.0.attn_norm_2.weight" in file.tensors


def _count_layers(said: Mapping[str, Any], known: Architecture) -> int:
    """The number of layers, without those that only predict further tokens; 0 if unknown."""
    layers, extra = said.get("block_count"), said.get(known.extra_layers, 0)
    return layers - extra if isinstance(layers, int) and isinstance(extra, int) else 0


def _add_head_size(values: dict[str, Any], said: Mapping[str, Any], known: Architecture) -> bool:
    """Add what depends on the size of a head; False if it, or its rotated part, is unsupported."""
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return True  # refused later
    rotated = said.get("rope.dimension_count")
    average = hidden // heads
    usual = rotated if rotated and known.model_type == "llama" else average
    size = values.setdefault("head_dim", usual)
    if not size:
        return True  # refused later, too
    is_part = known.part_rotates and isinstance(rotated, int) and 0 < rotated < size
    if rotated not in (None, size) and not is_part:
        return False
    if known.part_rotates:
        values["partial_rotary_factor"] = (rotated or size) / size
    if not known.has_head_dim:
        del values["head_dim"]
        return bool(size == average)
    if known.wide_layers:
        is_wide = values.get("num_hidden_layers") == known.wide_layers
        values["query_pre_attn_scalar"] = average if is_wide else size
    return True


def _add_sizes_by_layer(values: dict[str, Any], said: Mapping[str, Any], file: GgufFile) -> bool:
    """Add Gemma 4's config values for the sizes of each layer; False if it can't express them."""
    for key in _BY_LAYER[1:]:
        values.pop(key, None)
    layers, slides = values.get("num_hidden_layers", 0), said["attention.sliding_window_pattern"]
    if not isinstance(slides, list) or len(slides) != layers or not isinstance(slides[-1], bool):
        return False
    values["layer_types"] = ["sliding_attention" if n else "full_attention" for n in slides]
    shared = said["attention.shared_kv_layers"]
    if slides[-1] or not isinstance(shared, int) or not 0 <= shared < layers:
        return False
    inner = said.get("feed_forward_length")
    widths: list[Any] = inner if isinstance(inner, list) else [inner] * layers
    heads = values.get("num_key_value_heads")
    counts: list[Any] = heads if isinstance(heads, list) else [heads] * layers
    both: list[Any] = [*widths, *counts]
    if not widths or not counts or not all(isinstance(n, int) and 0 < n < _MOST for n in both):
        return False
    wide = [widths[0]] * (layers - shared) + [2 * widths[0]] * shared
    near = next((n for n, does in zip(counts, slides, strict=False) if does), counts[-1])
    values |= {"intermediate_size": widths[0], "use_double_wide_mlp": widths == wide}
    values |= {"num_key_value_heads": near, "num_global_key_value_heads": counts[-1]}
    values["attention_k_eq_v"] = f"blk.{slides.index(False)}.attn_v.weight" not in file.tensors
    values["vocab_size_per_layer_input"] = values.get("vocab_size", 0)
    rows = file.tensors.get("per_layer_token_embd.weight")
    if rows is not None:
        values["vocab_size_per_layer_input"] = rows.shape[0]
    size, near_size = values["global_head_dim"], values["head_dim"]
    rotated = (said["rope.dimension_count"], said["rope.dimension_count_swa"])
    return (
        (widths == wide or widths == [widths[0]] * layers)
        and counts == [near if does else counts[-1] for does in slides]
        and (near == counts[-1] or values["attention_k_eq_v"])
        and ("blk.0.ffn_gate_inp.weight" not in file.tensors or all(map(said.get, _OF_EXPERTS)))
        and rotated == (size, near_size)
        and _add_proportion(values, file, size)
    )


def _add_proportion(values: dict[str, Any], file: GgufFile, size: int) -> bool:
    """Add which part of a head of `size` numbers RoPE rotates; False without a valid tensor."""
    # The tensor divides the frequencies of the numbers that do not rotate by more than 1e20.
    slowed = file.tensors.get("rope_freqs.weight")
    if slowed is None or slowed.type != "F32" or slowed.shape != (size // 2,):
        return False
    numbers = _numbers(slowed)
    count = int((numbers == 1).sum())
    values["rope_parameters.full_attention.partial_rotary_factor"] = 2 * count / size
    return bool((numbers[:count] == 1).all() and (numbers[count:] > 1e20).all())


def _add_rotation(values: dict[str, Any], file: GgufFile, known: Architecture) -> bool:
    """Add the RoPE settings that the file has as tensors; False if they are not supported."""
    tensors = {name: file.tensors.get(key) for key, name in known.lists.items()}
    if any(tensors.values()):
        for name, tensor in tensors.items():
            if tensor is None or tensor.type != "F32":
                return False
            values[name] = _numbers(tensor).tolist()
        values["rope_parameters.rope_type"] = "longrope"
    slowed = file.tensors.get(known.slowed)
    if slowed is None:
        return True
    size = values.get("head_dim", 0)
    if slowed.type != "F32" or slowed.shape != (size // 2,) or not size:
        return False
    factor = float(_numbers(slowed).max())
    values["rope_parameters"] = {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
    # What Llama 3.1 divides the RoPE frequencies by: 1 for fast ones, `factor` for slow ones.
    wave = 2 * np.pi * values["rope_theta"] ** (np.arange(0, size, 2) / size)  # tokens of a turn
    fast = np.clip((8192 / wave - 1) / (4 - 1), 0, 1)
    expected = 1 / ((1 - fast) / max(factor, 1) + fast)
    return np.allclose(_numbers(slowed), expected, rtol=1e-4)


def _numbers(tensor: GgufTensor) -> NDArray[np.float32]:
    return np.array(tensor.data).view(np.float32)


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
