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
import yaml
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gguf_settings import add_settings, rotation_factors
from gguf_tokens import add_byte_pairs, add_sentence_pieces

_CONFIGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = _CONFIGS["models"]
VOCABULARY: int = _CONFIGS["sizes"]["vocab_size"]


def random_model(case: str, **more: Any) -> Any:
    """A transformers model with random weights, biases and norms."""
    _, model_type, values = MODELS[case]
    config = CONFIG_MAPPING[model_type](**{**_CONFIGS["sizes"], **values, **more})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    for _, parameter in _weights(module):
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def _weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and what Gemma 4 has beside them."""
    yield from module.named_parameters()
    yield from ((n, one) for n, one in module.named_buffers() if n.endswith("layer_scalar"))


# Gives the type to store a tensor in, by its name and shape.
KindOf = Callable[[str, tuple[int, ...]], str]


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


# Where random blocks have floats of two bytes, and which.
_HALVES = {
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 1e-4},
    "IQ4_NL": {0: 2e-3},
}


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
