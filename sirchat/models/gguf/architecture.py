"""Describes one architecture of GGUF files: how llama.cpp's converter writes its models.

`architectures.py` has the table of all architectures. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Change = Literal[
    "query pairs",
    "key pairs",
    "plus one",
    "gate",
    "up",
    "down",
    "gate and up",
    "qkv heads",
    "qkv values",
    "value rows",
    "value columns",
    "head rows",
    "minus exp",
]
"""What llama.cpp's converter does to a tensor; loading a GGUF file undoes this change.

`query pairs`, `key pairs`: the rows of each head are in rotary pairs, not in two halves.
`plus one`: 1 is added to the weights.
`gate`, `up`, `down`: the file has one tensor with these matrices of all experts; transformers joins
gate and up.
`gate and up`: the file joins these matrices of each expert, too: the rows of gate, then those of
up.
`qkv heads`: the file has the rows of all query heads, then all key heads, then all value heads; in
transformers, each key head and its value head follow the query heads that share it.
`qkv values`, `value rows`, `value columns`, `head rows`: in the file, the value heads that share a
key head are not neighbours. A value head is in the last rows, in rows, in columns, or has one row.
`minus exp`: the file stores -exp(x) for the weights x, in the order of `head rows`.
"""

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""The settings of every architecture: for each key of the GGUF header, the name in the config."""

MEANS_NOTHING = ("attention.value_length", "expert_count")
"""Keys of the GGUF header that are ignored, unless an architecture gives them a config value."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Parts outside the layers in most models: for each name in the file, the name in transformers."""


@dataclass(frozen=True)
class Architecture:
    """How a GGUF file of one architecture is read.

    Attributes:
        model_type: the name of the same architecture in transformers.
        layer: for the name of each part of a layer in the file, its name in transformers. `.weight`
            or `.bias` is added to both names, unless the key is a tensor's whole name.
        outer: names like those of `layer`, for the parts outside the layers.
        layers: the path of the layers in transformers.
        of_two_norms: names that replace those of `layer` in a file whose layers have two norms, one
            before attention and one before the feed-forward part.
        sizes: for each key of the header, the name of the config value, in addition to `SIZES`;
            `a.b` is the value b in the config's object a.
        texts: for each key of the header whose value is a text, the name of the config value (empty
            if there is none), and the texts that are supported.
        ratios: for each name of a config value, two keys of the header; the config value is the
            value of the first key divided by that of the second.
        lists: for each tensor that has numbers for the config instead of weights, the name of the
            config value.
        slowed: the name of the tensor by which the frequencies of RoPE are divided, as in Llama
            3.1.
        ignored: keys of the header that do not matter for a model of text.
        needed: keys of the header that must be there; transformers reads a file without them.
        fixed: config values that are not in the header, but the same for all models.
        flags: for each name of a config value, the end of a tensor's name; the config value says
            whether the file has a tensor whose name ends so.
        changes: for each part whose weights the converter changes, what it does; see `Change`.
        extra_layers: the key with the number of layers at the end that predict further tokens
            (multi-token prediction); these layers are not read.
        part_rotates: whether only the first `rope.dimension_count` numbers of a head may rotate.
        state_kind: the kind of the layers without key heads, in a file that lists the number of key
            heads of each layer.
        varies_by_layer: whether layers with a sliding window have other sizes than those without.
            The file then lists the sizes of each layer, and some layers use the keys and values of
            others.
        has_head_dim: whether the config has a `head_dim`; if not, the size of a head is the hidden
            size divided by the number of heads.
        refusal: the hint in the error for a file with unknown tensors or settings, which
            transformers would misread; empty if transformers may read such a file.
        wide_layers: a model with this number of layers scales attention by the hidden size per
            head, not by `head_dim`; 0 if the file or config gives the scale.
        swaps_experts: whether, in transformers, the experts' matrices are transposed, and the rows
            of gate and up alternate.
    """

    model_type: str
    layer: dict[str, str]
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layers: str = "model.layers"
    of_two_norms: Mapping[str, str] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)
    texts: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    slowed: str = ""
    ignored: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    extra_layers: str = ""
    part_rotates: bool = False
    state_kind: str = ""
    varies_by_layer: bool = False
    has_head_dim: bool = True
    refusal: str = ""
    wide_layers: int = 0
    swaps_experts: bool = False
