"""Models with random weights, to measure speed at sizes that are not bundled."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sirchat.models.model import (
    DeviceName,
    DtypeName,
    LoadedModel,
    Quantize,
    finished,
    load_model,
    pick_device,
    pick_dtype,
    wrap_model,
)

SHAPES: dict[str, dict[str, int]] = {
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
}
"""Llama configurations by name."""


def bench_model(
    name: str,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    quantize: Quantize = "auto",
) -> LoadedModel:
    """A model of SHAPES with random weights, or the model that `load_model` loads by that name."""
    if name not in SHAPES:
        return load_model(name, device=device, dtype=dtype, quantize=quantize)
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=8192, tie_word_embeddings=True)
    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(config)
    module = finished(module.to(where, kind), quantize)
    return wrap_model(f"{name} (random weights)", module, None)
