"""Tiny random models, one per architecture family, built from configs: no network, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.surprisal import PassResult

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,  # attention that prefers some rows to others
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {  # multi-head latent attention: as many key heads as query heads
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}

HELD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "yarn-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "mistral-sliding": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, **_MOE}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 24}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "gpt-neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "smollm3-nope": ("smollm3", {}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "ernie": ("ernie4_5", {"head_dim": 16}),
    "stablelm": ("stablelm", {}),
    "falcon": ("falcon", {"alibi": False, "new_decoder_architecture": False}),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 24},
    ),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {}),
    "persimmon": ("persimmon", {}),
    "deepseek-mla": ("deepseek_v3", {**_MLA, **_ROUTED}),
    "deepseek-v2": ("deepseek_v2", {**_MLA, **_ROUTED}),
    "minicpm3": ("minicpm3", _MLA),
    "longcat-flash": (
        "longcat_flash",
        {
            **_MLA,
            **_ROUTED,
            "num_hidden_layers": 8,  # two in each of its layers
            "head_dim": 8,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "youtu": ("youtu", _MLA),
    "axk1": ("axk1", {**_MLA, **_ROUTED}),
    "nanochat": ("nanochat", {"head_dim": 16}),
    "helium": ("helium", {"head_dim": 16}),
    "gpt-j": ("gptj", {**_GPT2, "rotary_dim": 8, "num_key_value_heads": 4}),
    "llama4": (
        "llama4_text",
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
}
"""Families whose cache can be held under a budget: name -> (model type, config)."""

LATENT = {"deepseek-mla", "deepseek-v2", "minicpm3", "longcat-flash", "youtu", "axk1"}
"""Those of them with compressed keys."""

_MIXED = ["linear_attention", "full_attention"] * 2
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": _MIXED,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
}
"""Families with attention layers beside others that have a state: model type -> config."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", _GPT2, "no known rotation"),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "no known rotation"),
    "bart-decoder": (
        "bart",
        {"d_model": 64, "decoder_attention_heads": 4, "decoder_layers": 4, "decoder_ffn_dim": 64},
        "positions",
    ),
    "mamba": ("mamba", {"state_size": 4}, "no attention layers"),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 4},
        "no attention layers",
    ),
    "recurrent-gemma": ("recurrent_gemma", {"head_dim": 16, "lru_width": 64}, "no known rotation"),
    "rwkv": ("rwkv", {}, "no keys and values per token"),
}
"""Families that are refused: name -> (model type, config, text that the error contains)."""


def build(model_type: str, overrides: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model of that type with random weights, the same each time."""
    config = CONFIG_MAPPING[model_type](**{**_BASE, **overrides})
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

    vocab_size = 256
    layers = 3
    heads = 1
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

    def share_unpacked(self, count: int) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        return PassResult.of_logits(self.forward(ids, cache, **how), ids)
