"""Tiny random models, one per architecture family, built from configs: no network, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.surprisal import PassResult

_CONFIGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
HELD: dict[str, tuple[str, dict[str, Any]]] = _CONFIGS["held"]
HYBRIDS: dict[str, dict[str, Any]] = _CONFIGS["hybrids"]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = _CONFIGS["refused"]
# Those whose attention differs most: windows, sinks, soft caps, parts and pairs that are rotated,
# layers without a rotation, compressed keys, experts.
TELLING = (
    *("llama", "qwen3-moe", "mistral-sliding", "gemma2", "gemma3", "gpt-neox", "gpt-oss", "cohere"),
    *("deepseek-mla", "smollm3-nope", "llama4"),
)
# Those of the families in `HELD` with compressed keys.
LATENT = {"deepseek-mla", "deepseek-v2", "minicpm3", "longcat-flash", "youtu", "axk1"}


def build(model_type: str, overrides: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model of that type with random weights, the same each time."""
    config = CONFIG_MAPPING[model_type](**{**_CONFIGS["base"], **overrides})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@cache
def loaded(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The model of the supported family `name`, with its rotations found; built once."""
    return wrap_model(name, build(*HELD[name], dtype), None)


_Model: Any = object  # so that it may stand for a `LoadedModel`


class BigramModel(_Model):  # type: ignore[misc]
    """A model whose logits depend on the last token only, so that every surprisal is known.

    Each cached key and value is its token's id, so a row in the wrong slot is found.
    `before_layer(layer, ids)` is called before each layer writes to the cache, and may raise;
    `passes` records the ids of each forward pass.
    """

    device = torch.device("cpu")
    decode_step = None
    has_linear_head = False
    vocab_size = 256
    layers = 3
    query_heads = 1
    sliding_layers = ()
    window = None

    def __init__(self, context_length: int = 300) -> None:
        self.context_length = context_length
        generator = torch.Generator().manual_seed(0)
        self.table = 2 * torch.randn(self.vocab_size, self.vocab_size, generator=generator)
        self.passes: list[list[int]] = []

    def new_cache(self, capacity: int) -> BoundedCache:
        return BoundedCache([LayerRotation(None)] * self.layers, capacity)

    def before_layer(self, layer: int, ids: Sequence[int]) -> None:
        """Does nothing; tests replace it to raise."""

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        rows = torch.tensor(ids, dtype=torch.float32)[None, None, :, None]  # [1, 1, m, 1]
        for layer in range(self.layers):
            self.before_layer(layer, ids)
            cache.layers[layer].update(rows, rows)
        self.passes.append(list(ids))
        return self.table[torch.tensor(ids)]

    def read(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        return PassResult.of_logits(self.forward(ids, cache, **how), ids)
