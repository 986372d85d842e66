"""The settings of a random model, written to a GGUF file's header as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gguf
import torch


def add_settings(writer: Any, module: Any, architecture: str) -> None:
    """Write the sizes and settings of a model."""
    config: Any = module.config
    if architecture == "falcon":
        _add_settings_of_falcon(writer, config)
        return
    inner: Any = getattr(config, "intermediate_size", None)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    size = 0
    if architecture != "gemma4":  # its layers differ
        size = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    slides = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]
    kv_heads: Any = 0 if architecture == "gemma4" else config.num_key_value_heads
    if architecture == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
        inner = module.model.layers[0].feed_forward.w1.out_features
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture == "gemma4":
        by_layer = [config.per_layer_config[at] for at in range(len(slides))]
        kv_heads = [one.num_key_value_heads for one in by_layer]
        shared = len(slides) - config.num_kv_shared_layers
        is_wide = config.use_double_wide_mlp
        inner = [2 * inner if is_wide and at >= shared else inner for at in range(len(slides))]
        inner = inner if is_wide else inner[0]
    if inner is not None:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "gemma4":
        _add_settings_by_layer(writer, config)
    elif "head_dim" in config.to_dict():
        writer.add_key_length(size)
        writer.add_value_length(size)
    if architecture in ("llama", "smollm3", "granite", "phi3", "glm4", "qwen35", "qwen35moe"):
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    if architecture in ("llama", "smollm3", "granite", "lfm2"):
        writer.add_vocab_size(config.vocab_size)
    if architecture in ("gemma2", "gemma3", "gemma4", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        by = math.log(scale) / math.log(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + by))
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture.startswith("qwen35"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = "top_k_experts" if architecture == "gemma4" else "num_experts_per_tok"
    if experts:
        inner = getattr(config, "moe_intermediate_size", inner)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, chosen))
        writer.add_expert_feed_forward_length(inner)
    if architecture in ("qwen2moe", "qwen35moe"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_settings_of_falcon(writer: Any, config: Any) -> None:
    has_one_key_head = config.multi_query and not config.new_decoder_architecture
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if has_one_key_head else config.num_kv_heads)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _add_settings_by_layer(writer: Any, config: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    whole = config.per_layer_config["full_attention"].head_dim
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    part = config.per_layer_config["sliding_attention"].head_dim
    writer.add_key_length_swa(part)
    writer.add_value_length_swa(part)
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(part)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def rotation_factors(module: Any) -> Iterator[tuple[str, list[float]]]:
    """By what the frequencies of the rotation are divided."""
    rope = module.config.rope_parameters
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            yield f"rope_factors_{name}.weight", rope[f"{name}_factor"]
    if module.config.model_type == "gemma4_text":
        half = module.config.per_layer_config["full_attention"].head_dim // 2
        count = int(half * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", [1.0] * count + [1e30] * (half - count)
    if rope.get("rope_type") == "llama3":
        size = module.config.head_dim
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
        yield "rope_freqs.weight", (plain / module.model.rotary_emb.inv_freq).tolist()
