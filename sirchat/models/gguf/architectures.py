"""How llama.cpp's converter writes the models of each architecture: names, settings and weights.

Names and settings are those of https://github.com/ggml-org/llama.cpp/tree/master/conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# What llama.cpp's converter does to a tensor; loading a GGUF file undoes this change.
Conversion = Literal[
    # The rows of each head are in rotary pairs, not in two halves.
    "query pairs",
    "key pairs",
    # 1 is added to the weights.
    "plus one",
    # One tensor has these matrices of all experts; transformers joins gate and up.
    "gate",
    "up",
    "down",
    # Each expert's matrices are joined, too: the rows of gate, then those of up.
    "gate and up",
    # The value heads that share a key head are not neighbours. A value head is in the last rows, in
    # rows, in columns, or has one row.
    "qkv values",
    "value rows",
    "value columns",
    "head rows",
    # -exp(x) for the weights x, in the order of `head rows`.
    "minus exp",
]

# The settings of every architecture: for each key of the GGUF header, the name in the config.
CONFIG_NAMES = {
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

# Keys that every GGUF header of a model has.
REQUIRED_KEYS = (
    *("context_length", "block_count", "embedding_length", "attention.head_count"),
    "attention.layer_norm_rms_epsilon",
)

# Keys that change no logit, whatever their value is: of norms that a model lacks, or of vectors.
IGNORED_KEYS = ("attention.layer_norm_epsilon", "pooling_type")

# Other keys, which change nothing only if they have one of these values. An architecture may give
# any of them a meaning.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("expert_count", "expert_used_count", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    "tensor_data_layout": ("Meta AI original pth",),  # in old files of Llama
}

# Parts outside the layers in most models: for each name in the file, the name in transformers.
PARTS_OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MERGED_GATE_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_BEFORE_AND_AFTER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}

_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

_ROTARY_PAIRS: dict[str, Conversion] = {"attn_q": "query pairs", "attn_k": "key pairs"}
_STACKED_EXPERTS: dict[str, Conversion] = {
    "ffn_gate_exps": "gate",
    "ffn_up_exps": "up",
    "ffn_down_exps": "down",
}
_PLUS_ONE: dict[str, Conversion] = dict.fromkeys(
    ("output_norm", *_NORMS_BEFORE_AND_AFTER, *_HEAD_NORMS), "plus one"
)
_MOE_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

_DENSE_LAYER = _NORMS | _ATTENTION | _GATED_MLP
_LONG_FACTORS = "rope_parameters.long_factor"
_SHORT_FACTORS = "rope_parameters.short_factor"


@dataclass(frozen=True)
class Architecture:
    """How to read a GGUF file of one architecture; dictionaries map the file's names to others."""

    # The same architecture in transformers.
    model_type: str
    # The parts of a layer, by their names in transformers. `.weight` or `.bias` is added to both
    # names, unless the key is a tensor's whole name.
    layer_parts: dict[str, str]
    # The same for the parts outside the layers.
    outside_parts: Mapping[str, str] = field(default_factory=lambda: PARTS_OUTSIDE_LAYERS)
    # Header keys and their config values, besides `CONFIG_NAMES`; `a.b`: b in the object a.
    # Those in `config_names` must be there.
    config_names: Mapping[str, str] = field(default_factory=dict)
    optional_names: Mapping[str, str] = field(default_factory=dict)
    # Those of them that may be 0.
    may_be_zero: tuple[str, ...] = ()
    # Header keys whose value must be one of a few.
    allowed_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Config values that are one header value divided by another.
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Tensors that have numbers for the config instead of weights.
    config_tensors: Mapping[str, str] = field(default_factory=dict)
    # The tensor by which the frequencies of RoPE are divided, as in Llama 3.1.
    rope_divisors: str = ""
    # Header keys that do not matter for a model of text.
    ignored_keys: tuple[str, ...] = ()
    # Other header keys that must be there.
    required_keys: tuple[str, ...] = ()
    # Config values that the header lacks, because they are the same for all models.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Config values that say whether the file has a tensor whose name ends so.
    tensor_flags: Mapping[str, str] = field(default_factory=dict)
    # What the converter does to some tensors, by their whole name or without `.weight` or `.bias`.
    conversions: dict[str, Conversion] = field(default_factory=dict)
    # The header key with the number of last layers that only predict further tokens (multi-token
    # prediction); these are not read.
    prediction_layers_key: str = ""
    # Whether only the first `rope.dimension_count` numbers of a head may rotate.
    rotates_partly: bool = False
    # The kind of the layers without key heads, in a file that lists each layer's key heads.
    state_layer_type: str = ""
    # Whether sliding-window layers have other sizes than the rest. The file then lists the sizes of
    # each layer, and some layers use the keys and values of others.
    has_sizes_by_layer: bool = False
    # Where the config has how RoPE is scaled for long texts; empty if that is not supported.
    rope_config: str = "rope_parameters"
    # A model of so many layers scales attention by the hidden size per head, not by `head_dim`.
    layers_scaled_by_hidden: int = 0
    # Whether transformers has the experts' matrices transposed, with gate and up rows alternating.
    transposes_experts: bool = False


_QWEN35 = Architecture(
    "qwen3_5_text",
    _ATTENTION
    | _HEAD_NORMS
    | _GATED_MLP
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    },
    config_names={
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    ratios={"linear_value_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
    allowed_values={"ssm.v_head_reordered": (True,)},
    ignored_keys=("rope.dimension_sections", "ssm.inner_size"),
    required_keys=("ssm.inner_size", "rope.dimension_count"),
    conversions=_PLUS_ONE
    | {
        "attn_qkv": "qkv values",
        "ssm_conv1d": "qkv values",
        "attn_gate": "value rows",
        "ssm_out": "value columns",
        "ssm_alpha": "head rows",
        "ssm_beta": "head rows",
        "ssm_dt": "head rows",
        "ssm_a": "minus exp",
    },
    prediction_layers_key="nextn_predict_layers",
    rotates_partly=True,
)


# For each architecture that sirchat reads, by its name in GGUF files: how such a file is read.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", _DENSE_LAYER, conversions=_ROTARY_PAIRS, rope_divisors="rope_freqs.weight"
    ),
    "qwen2": Architecture("qwen2", _DENSE_LAYER),
    "qwen3": Architecture("qwen3", _DENSE_LAYER | _HEAD_NORMS),
    "gemma2": Architecture(
        "gemma2",
        _NORMS_BEFORE_AND_AFTER | _ATTENTION | _GATED_MLP,
        optional_names={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        may_be_zero=("attn_logit_softcapping", "final_logit_softcapping"),
        conversions=_PLUS_ONE,
        layers_scaled_by_hidden=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _NORMS_BEFORE_AND_AFTER | _ATTENTION | _HEAD_NORMS | _GATED_MLP,
        config_names={"attention.sliding_window": "sliding_window"},
        optional_names={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
            "rope.local.freq_base": "rope_local_base_freq",
        },
        may_be_zero=("final_logit_softcapping",),
        required_keys=("rope.freq_base",),
        rope_config="rope_parameters.full_attention",
        conversions=_PLUS_ONE,
        layers_scaled_by_hidden=62,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _NORMS_BEFORE_AND_AFTER
        | _ATTENTION
        | _HEAD_NORMS
        | _GATED_MLP
        | {
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        outside_parts=PARTS_OUTSIDE_LAYERS
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "rope_freqs.weight": "",
        },
        config_names={
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "rope.freq_base": "rope_parameters.full_attention.rope_theta",
            "rope.freq_base_swa": "rope_parameters.sliding_attention.rope_theta",
        },
        optional_names={
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        may_be_zero=(
            *("attention.shared_kv_layers", "embedding_length_per_layer_input"),
            *("final_logit_softcapping", *_MOE_SIZES),
        ),
        ignored_keys=("attention.value_length_swa",),
        required_keys=(
            "attention.sliding_window_pattern",
            "rope.dimension_count",
            "rope.dimension_count_swa",
        ),
        constants={
            "rope_parameters.full_attention.rope_type": "proportional",
            "rope_parameters.sliding_attention.rope_type": "default",
        },
        tensor_flags={"enable_moe_block": ".ffn_gate_inp.weight"},
        conversions={"ffn_gate_up_exps": "gate and up", "ffn_down_exps": "down"},
        has_sizes_by_layer=True,
        rope_config="",
    ),
    "phi3": Architecture(
        "phi3",
        _NORMS
        | _MERGED_GATE_MLP
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"},
        optional_names={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        may_be_zero=("attention.sliding_window",),
        config_tensors={
            "rope_factors_long.weight": _LONG_FACTORS,
            "rope_factors_short.weight": _SHORT_FACTORS,
        },
        rotates_partly=True,
    ),
    "smollm3": Architecture(
        "smollm3", _DENSE_LAYER, conversions=_ROTARY_PAIRS, constants={"no_rope_layer_interval": 4}
    ),
    "olmo2": Architecture(
        "olmo2",
        _ATTENTION
        | _HEAD_NORMS
        | _GATED_MLP
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": Architecture(
        "granite",
        _DENSE_LAYER,
        config_names={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        allowed_values={"rope.scaling.finetuned": (True,)},  # without, nothing rotates
        conversions=_ROTARY_PAIRS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _NORMS | _ATTENTION | _HEAD_NORMS | _EXPERTS,
        config_names=_MOE_SIZES,
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        conversions=_STACKED_EXPERTS,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _NORMS | _ATTENTION | _EXPERTS | _SHARED_EXPERT,
        config_names=_MOE_SIZES | _SHARED_SIZE,
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        conversions=_STACKED_EXPERTS,
    ),
    "glm4": Architecture(
        "glm4",
        _ATTENTION
        | _MERGED_GATE_MLP
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        required_keys=("rope.dimension_count",),
        tensor_flags={"attention_bias": ".attn_q.bias"},
        rotates_partly=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        config_names={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        },
        optional_names={"expert_feed_forward_length": "intermediate_size"},
        constants={"rope_parameters.truncate": False},
        conversions=_STACKED_EXPERTS,
        transposes_experts=True,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        layer_parts=_QWEN35.layer_parts | _EXPERTS | _SHARED_EXPERT,
        config_names={**_QWEN35.config_names, **_MOE_SIZES, **_SHARED_SIZE},
        conversions=_QWEN35.conversions | _STACKED_EXPERTS,
    ),
    "lfm2": Architecture(
        "lfm2",
        _ATTENTION
        | {
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        outside_parts={
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
        },
        config_names={"shortconv.l_cache": "conv_L_cache"},
        optional_names={"attention.layer_norm_rms_epsilon": "norm_eps"},
        required_keys=("attention.head_count_kv",),
        constants={"block_auto_adjust_ff_dim": False},
        tensor_flags={"conv_bias": ".shortconv.in_proj.bias"},
        state_layer_type="conv",
    ),
}
