"""How llama.cpp's converter writes the models of each architecture, by `architectures.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

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
