"""Translates a GGUF file to transformers: the values of its config, and the names of its tensors.

Does not import torch, so that files can be listed quickly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sirchat.models.gguf.header import BLOCKS, GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that are read here; their files use the same names for tensors and sizes."""

_SIZES = {
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
_SPECIAL = ("bos", "eos", "unknown", "padding")
_MEANS_NOTHING = ("attention.value_length", "rope.dimension_count", "expert_count")

_MOST = 1 << 40  # values of this size or more count as invalid

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_supported(file: GgufFile) -> bool:
    """Whether `load_module` can read the file: its architecture, sizes and all tensors."""
    values = config_values(file) if file.architecture in ARCHITECTURES else None
    return values is not None and all(
        parameter_name(name) is not None and tensor.type in BLOCKS
        for name, tensor in file.tensors.items()
    )


def has_blocks(file: GgufFile) -> bool:
    """Whether any weights of the file are stored in blocks of few bits, not as plain floats."""
    return any(BLOCKS[one.type][1] > 1 for one in file.tensors.values())


def config_values(file: GgufFile) -> Mapping[str, Any] | None:
    """The values of the model's config; None if the file has settings not known here."""
    kind, metadata = file.architecture, file.metadata
    values: dict[str, Any] = {"model_type": kind}
    for key, value in metadata.items():
        if not key.startswith(kind + "."):
            continue
        part = key.removeprefix(kind + ".")
        if part in _SIZES:
            if not isinstance(value, int | float) or not 0 < value < _MOST:
                return None  # such as another number of heads in each layer
            values[_SIZES[part]] = value
        elif part not in _MEANS_NOTHING:  # such as a scaled rotation, or experts
            return None
    if kind == "llama" and "head_dim" not in values:
        values["head_dim"] = metadata.get("llama.rope.dimension_count")
    values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    short = {"unknown": "unk", "padding": "pad"}
    for one in _SPECIAL:
        values[f"{short.get(one, one)}_token_id"] = metadata.get(f"tokenizer.ggml.{one}_token_id")
    return {key: value for key, value in values.items() if value is not None}


def parameter_name(name: str) -> str | None:
    """The name of a GGUF tensor in transformers; None for an unknown tensor."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if found is None:
        return None
    layer, part, kind = found.groups()
    inner = (_OUTER if layer is None else _LAYER).get(part)
    if inner is None:
        return None
    return f"{inner}.{kind}" if layer is None else f"model.layers.{layer}.{inner}.{kind}"
