"""Writes a GGUF file with random weights, to measure the speed of a model of any size.

The weights are written in parts, so that a file of any size takes little memory. Their values are
about as large as those of a trained model, so that logits are finite. The model's text is nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import SettingError
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT
from sirchat.paths import tiny_dir

CONTEXT = 8192  # the context length, in tokens, that a written GGUF file states

_HEAD = "Q6_K"  # type of embeddings and output head, as in most four-bit files
# The scale factors for random weights, by GGUF block type. For each type, the keys are the offsets
# of the block's float16 factors in bytes, and the values are the factors
_FACTORS = {
    "Q4_0": {0: 0.0043},
    "Q4_1": {0: 0.0043, 2: -0.0325},
    "Q4_K": {0: 8e-5, 2: 6e-4},
    "Q6_K": {208: 1.5e-5},
}
_PART = 1 << 24  # bytes that are written at once

# The sizes of a model, by the names that they have in a config of transformers
Shape = Mapping[str, Any]


def write_model(path: Path, shape: Shape, kind: str = "Q4_K") -> Path:
    """Write a GGUF file with random weights for a model of the sizes `shape`; returns `path`.

    Raises SettingError if `kind` is not allowed, the package gguf is not installed, or the file
    can't be written.
    """
    if kind not in FOUR_BIT:
        raise SettingError(f"--type {kind!r} is none of {', '.join(FOUR_BIT)}")
    try:
        import gguf
    except ImportError:
        raise SettingError(
            "writing a GGUF file needs the package gguf", hint="pip install '.[gguf]'"
        ) from None
    writer = gguf.GGUFWriter(path, shape["model_type"])
    _add_sizes(writer, shape)
    _add_tokenizer(writer, shape["vocab_size"])
    tensors = list(_tensors(shape, kind))
    for name, sizes, of in tensors:
        number, values, size = BLOCKS[of]
        stored = gguf.GGMLQuantizationType(number)
        count = int(np.prod(sizes)) // values * size
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), count, stored)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (out,) = writer.fout
        writer.write_padding(out, out.tell())
        random = np.random.default_rng(0)
        for _, sizes, of in tensors:
            for part in _parts(sizes, of, random):
                part.tofile(out)
            writer.write_padding(out, out.tell())
        writer.close()
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}") from None
    return path


def _add_sizes(writer: Any, shape: Shape) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(_head_dim(shape))
    writer.add_value_length(_head_dim(shape))
    writer.add_rope_dimension_count(_head_dim(shape))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(shape["vocab_size"])


def _add_tokenizer(writer: Any, size: int) -> None:
    folder = tiny_dir()
    bundled = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in bundled["added_tokens"]}
    ids = dict(bundled["model"]["vocab"]) | special
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"<unused-{number}>" for number in range(len(tokens), size)]
    normal, control = 1, 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    merges = bundled["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(special["<|bos|>"])
    writer.add_eos_token_id(special["<|end|>"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))


def _head_dim(shape: Shape) -> int:
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])


def _tensors(shape: Shape, kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The name, the shape and the GGUF type of each tensor, in the file's order."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], _head_dim(shape)
    queries, keys = (head * shape[f"num_{one}_heads"] for one in ("attention", "key_value"))
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if shape["model_type"] == "qwen3":
        norms |= {"attn_q_norm": head, "attn_k_norm": head}
    yield "token_embd.weight", (shape["vocab_size"], hidden), _HEAD
    for layer in range(shape["num_hidden_layers"]):
        for name, size in norms.items():
            yield f"blk.{layer}.{name}.weight", (size,), "F32"
        for name, sizes in matrices.items():
            yield f"blk.{layer}.{name}.weight", sizes, kind
    yield "output_norm.weight", (hidden,), "F32"
    if not shape["tie_word_embeddings"]:
        yield "output.weight", (shape["vocab_size"], hidden), _HEAD


def _parts(
    sizes: tuple[int, ...], kind: str, random: np.random.Generator
) -> Iterator[NDArray[np.generic]]:
    """Yield the data of one tensor of the shape `sizes`, in parts that fit into memory."""
    if kind == "F32":
        yield np.ones(sizes, "<f4")
        return
    _, values, size = BLOCKS[kind]
    left, most = int(np.prod(sizes)) // values, _PART // size
    while left:
        count = min(left, most)
        blocks = random.integers(0, 256, (count, size), np.uint8)
        for at, factor in _FACTORS[kind].items():
            scale = factor * random.uniform(0.9, 1.1, (count, 1))
            blocks[:, at : at + 2] = scale.astype("<f2").view(np.uint8)
        yield blocks
        left -= count
