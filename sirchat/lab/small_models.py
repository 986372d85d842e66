"""Builds a small model, with random weights, of any family that the installed transformers has.

A family is the value of `model_type` in a model's config.json. The small model has the default
configuration of its family, but small values for the settings that are sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_MOST_WEIGHTS = 20_000_000

# For each small value: the names of the settings that get this value in a small model.
_SIZES: dict[float, str] = {
    1: "n_group topk_group num_expert_group first_k_dense_replace moe_num_shared_experts "
    "n_shared_experts num_shared_experts",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk "
    "num_experts_per_token moe_k zero_expert_num encoder_layers index_n_heads "
    "linear_num_key_heads num_layers_per_stack kv_n_heads heads_per_ngram n_groups",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads swa_num_attention_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts linear_num_value_heads linear_num_heads "
    "num_query_groups",
    6: "num_hidden_layers n_layer n_layers num_layers decoder_layers",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim index_topk mamba_d_state mamba_n_heads "
    "mamba_num_heads mamba_dt_rank ssm_state_size state_size time_step_rank adapter_rank",
    16: "head_dim v_head_dim kv_lora_rank q_lora_rank qk_head_dim swa_head_dim index_head_dim "
    "kv_channels query_pre_attn_scalar hidden_size_per_layer_input linear_head_dim dim_head "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim "
    "block_multiple_of laurel_rank hc_lowrank router_hidden_size attention_head_size d_head",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "shared_intermediate_size shared_experts_intermediate_size chunk_size mamba_chunk_size "
    "moe_shared_expert_intermediate_size ple_embed_dim attention_head_dim local_attn_chunk_length "
    "lsh_attn_chunk_length",
    48: "sliding_window sliding_window_size local_attention window_size attention_window_size",
    64: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim "
    "dim_model_base lru_width input_embedding_size output_embedding_size",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff "
    "intermediate_size_mlp dense_intermediate_size d_inner feed_forward_size",
    128: "vocab_size vocab_size_per_layer_input mamba_d_ssm attention_hidden_size "
    "ngram_vocab_size_base encoder_hash_byte_group_vocab pronunciation_vocab_size "
    "shape_vocab_size",
    512: "original_max_position_embeddings",
    1024: "max_position_embeddings n_positions max_seq_len attention_chunk_size",
    0.1: "initializer_range",  # large, so that attention prefers some rows to others
}

_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention
_ATTENTION = ["full_attention"]
_LINEAR = ["linear_attention"]
# For some families: settings that a small model needs besides the small sizes.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3, 5]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon": {"alibi": False},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", *_ATTENTION] * 3,
    },
    "granitemoehybrid": {"layer_types": [*_LINEAR, *_ATTENTION] * 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "hrm_text": {"num_hidden_layers": 16},
    "lfm2": {"layer_types": ["conv", *_ATTENTION] * 3},
    "lfm2_moe": {"layer_types": ["conv", *_ATTENTION] * 3},
    "mamba2": {"num_heads": 8},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"num_blocks": 6},
    "zamba": {"layers_block_type": [*_LINEAR, "hybrid"] * 3, "mamba_dt_rank": 8},
    "zamba2": {"layers_block_type": [*_LINEAR, "hybrid"] * 3},
    "zaya": {"num_experts_per_tok": 1},
}


def causal_families() -> list[str]:
    """The families (`model_type`) that transformers can load as causal language models."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def language_model_of(family: str) -> str | None:
    """The family of the language model inside a multimodal family; None for any other family."""
    config = CONFIG_MAPPING[family]
    inner = (getattr(config, "sub_configs", None) or {}).get("text_config")
    name = str(getattr(inner, "model_type", "")) or f"{family}_text"
    return name if inner is not None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def small_config(family: str, **own: Any) -> Any:
    """The default configuration of a model family, with small sizes and with the settings `own`."""
    usual = CONFIG_MAPPING[family]().to_dict()
    sizes: dict[str, Any] = {
        name: size for size, names in _SIZES.items() for name in names.split() if name in usual
    }
    if "kv_lora_rank" in usual:
        sizes |= {name: size for name, size in _LATENT.items() if name in usual}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[family](**{**sizes, **tokens, **_OWN.get(family, {}), **own})


def build_small(family: str, **own: Any) -> Any:
    """Build a small model of a family with random weights, which are the same each time.

    Raises any error of transformers, and ValueError if the model would have more than 20 million
    weights.
    """
    config = small_config(family, **own)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    count = sum(weights.numel() for weights in outline.parameters())
    if count > _MOST_WEIGHTS:
        raise ValueError("too many weights even with small sizes")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()
