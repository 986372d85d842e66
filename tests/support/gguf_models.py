"""Small random models of many architectures, written as GGUF files as llama.cpp's converter does.

The names of the tensors are those that ggml's own package gives for the names in transformers; how
weights are changed is written down here a second time, apart from the code that reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gguf_settings import add_settings, rotation_factors
from gguf_tokens import add_byte_pairs, add_sentence_pieces

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "long_factor": [1.0 + at for at in range(6)],
    "short_factor": [1.0 + at / 8 for at in range(6)],
    "partial_rotary_factor": 0.75,
}
_QWEN35 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCABULARY,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama3": ("llama", "llama", {"rope_parameters": _LLAMA_3, "head_dim": 32}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", "gemma2", {**_GEMMA, "final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3", "gemma3_text", {**_GEMMA, "num_hidden_layers": 7}),
    "gemma3-long": (
        "gemma3",
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4-wide": (
        "gemma4",
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-experts": (
        "gemma4",
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 8}),
    "phi3-long": (
        "phi3",
        "phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 64},
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}),
    "olmo2": ("olmo2", "olmo2", {}),
    "granite": (
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.125,
        },
    ),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"head_dim": 16, "norm_topk_prob": True, **_MOE}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {"shared_expert_intermediate_size": 64, **_MOE}),
    "glm4": ("glm4", "glm4", {"head_dim": 16}),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": _YARN,
        },
    ),
    "qwen35": ("qwen35", "qwen3_5_text", _QWEN35),
    "qwen35moe": (
        "qwen35moe",
        "qwen3_5_moe_text",
        {**_QWEN35, **_MOE, "shared_expert_intermediate_size": 64},
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    ),
    "falcon-7b": ("falcon", "falcon", {"num_attention_heads": 6, "hidden_size": 96}),
    "falcon-40b": ("falcon", "falcon", _FALCON),
    "falcon-one-norm": ("falcon", "falcon", {**_FALCON, "num_ln_in_parallel_attn": 1}),
    "falcon-one-key-head": ("falcon", "falcon", {**_FALCON, "num_kv_heads": 1}),
}
"""For each case: the architecture, the model type in transformers, and config values."""


def random_model(case: str, **more: Any) -> Any:
    """A transformers model with random weights, biases and norms."""
    _, model_type, values = MODELS[case]
    config = CONFIG_MAPPING[model_type](**{**_SIZES, **values, **more})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    for _, parameter in _weights(module):
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def _weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and what Gemma 4 has beside them."""
    yield from module.named_parameters()
    yield from ((n, one) for n, one in module.named_buffers() if n.endswith("layer_scalar"))


KindOf = Callable[[str, tuple[int, ...]], str]
"""Gives the type to store a tensor in, by its name and shape."""


def write_model(path: Path, module: Any, case: str, kind_of: KindOf) -> Path:
    """Write a model and a small tokenizer to `path`; its weights become those that are stored.

    Matrices whose type is a K type such as `Q4_K` are filled with random blocks.
    """
    architecture = MODELS[case][0]
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, module, architecture)
    if architecture in ("gemma2", "gemma3", "phi3", "gemma4"):
        add_sentence_pieces(writer, VOCABULARY)
    else:
        add_byte_pairs(writer, VOCABULARY)
    for piece in _pieces(module, architecture):
        flat = piece.parameter.data.view(-1)
        values = flat[piece.places].float() + piece.added
        values = -values.exp() if piece.is_exponential else values
        kind = gguf.GGMLQuantizationType[kind_of(piece.name, tuple(values.shape))]
        blocks = _blocks(values.numpy(), kind)
        writer.add_tensor(piece.name, blocks, raw_dtype=kind)
        stored = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))
        stored = (-stored).log() if piece.is_exponential else stored
        flat[piece.places] = stored.view(values.shape) - piece.added
    for name, factors in rotation_factors(module):
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Piece(NamedTuple):
    """A tensor of the file: where each of its numbers is in a parameter.

    Stored is the number plus `added`, or minus its exponential.
    """

    name: str
    parameter: Tensor
    places: Tensor
    added: float = 0
    is_exponential: bool = False


def _pieces(module: Any, architecture: str) -> Iterator[_Piece]:
    """Split all parameters as they are stored in the file."""
    config = module.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for full, parameter in _weights(module):
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        places = torch.arange(parameter.numel()).view(parameter.shape)
        for name, some in _parts(full, places, architecture, config):
            stem = re.sub(r"\.(weight|bias|scale)$", "", name := _renamed(name))
            found = names.get_name(stem)
            assert found is not None, full
            is_more = full.endswith("norm.weight") and architecture.startswith(
                ("gemma2", "gemma3", "qwen35")
            )
            added = float(is_more and "linear_attn" not in full)
            is_exponential = full.endswith("A_log")
            yield _Piece(found + name[len(stem) :], parameter, some, added, is_exponential)


def _renamed(name: str) -> str:
    """The name that the converter gives to a parameter before it looks up the GGUF name."""
    name = name.replace("layer_scalar", "layer_scalar.weight")
    name = name.replace("router.scale", "router.proj.scale")
    name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
    return name.replace("sinks", "sinks.weight").replace("dt_bias", "dt_proj.bias")


def _parts(
    name: str, places: Tensor, architecture: str, config: Any
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a parameter is stored as: for each a name as in transformers, its places."""
    if ".experts." in name:
        name = name.removesuffix("_bias") + (".bias" if name.endswith("_bias") else ".weight")
        if architecture == "gpt-oss" and places.ndim == 3:
            places = places.mT
        if "gate_up" not in name or architecture == "gemma4":
            yield name, places
        elif architecture == "gpt-oss":
            yield name.replace("gate_up", "gate"), places[:, ::2]
            yield name.replace("gate_up", "up"), places[:, 1::2]
        else:
            half = places.shape[1] // 2
            yield name.replace("gate_up", "gate"), places[:, :half]
            yield name.replace("gate_up", "up"), places[:, half:]
        return
    if architecture in ("llama", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rows = places.view(heads, 2, -1, *places.shape[1:])
        places = rows.transpose(1, 2).reshape(places.shape)
    if "conv.conv" in name or "conv1d" in name:
        places = places[:, 0]
    if "query_key_value" in name and config.new_decoder_architecture:
        groups = places.view(config.num_kv_heads, -1, config.head_dim, *places.shape[1:])
        parts = groups[:, :-2], groups[:, [-2]], groups[:, [-1]]
        places = torch.cat([part.flatten(0, 2) for part in parts])
    if "linear_attn" in name:
        places = _tiled(name, places, config)
    yield name, places


def _tiled(name: str, places: Tensor, config: Any) -> Tensor:
    """The first value heads of all key heads, then the second ones, and so on."""
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim
    heads = torch.arange(count).view(keys, -1).T.flatten()
    rows = (heads[:, None] * size + torch.arange(size)).flatten()
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return places[heads]
    if name.endswith("in_proj_z.weight"):
        return places[rows]
    if name.endswith("out_proj.weight"):
        return places[:, rows]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * keys * config.linear_key_head_dim
        return torch.cat((places[:before], places[before:][rows]))
    return places


_HALVES = {
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 1e-4},
    "IQ4_NL": {0: 2e-3},
}
"""Where random blocks have floats of two bytes, and which."""


def _blocks(values: np.ndarray[Any, Any], kind: Any) -> Any:
    """The values in a type's blocks; random blocks of a type that ggml's package can't write."""
    if kind.name not in _HALVES:
        return gguf.quants.quantize(values, kind)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // size, width), dtype=np.uint8)
    for at, half in _HALVES[kind.name].items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(half).tobytes(), np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)
