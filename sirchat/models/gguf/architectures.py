"""How llama.cpp's converter writes the models of each architecture: names, settings and weights.

Names and settings are those of https://github.com/ggml-org/llama.cpp/tree/master/conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# What llama.cpp's converter does to a tensor; loading a GGUF file undoes this change.
Change = Literal[
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
REQUIRED_KEYS = ("context_length", "block_count", "embedding_length", "attention.head_count")

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
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GATE_IN_UP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
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

_PAIRS: dict[str, Change] = {"attn_q": "query pairs", "attn_k": "key pairs"}
_STACKED: dict[str, Change] = {
    "ffn_gate_exps": "gate",
    "ffn_up_exps": "up",
    "ffn_down_exps": "down",
}
_PLUS_ONE: dict[str, Change] = dict.fromkeys(
    ("output_norm", *_NORMS_BEFORE_AND_AFTER, *_HEAD_NORMS), "plus one"
)
_MOE_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

_DENSE = _NORMS | _ATTENTION | _GATED
_LONG = "rope_parameters.long_factor"
_SHORT = "rope_parameters.short_factor"


@dataclass(frozen=True)
class Architecture:
    """How a GGUF file of one architecture is read; a dictionary maps the file's names to others."""

    # The same architecture in transformers.
    model_type: str
    # The parts of a layer, by their names in transformers. `.weight` or `.bias` is added to both
    # names, unless the key is a tensor's whole name.
    layer: dict[str, str]
    # The same for the parts outside the layers.
    outer: Mapping[str, str] = field(default_factory=lambda: PARTS_OUTSIDE_LAYERS)
    # Header keys and their config values, besides `CONFIG_NAMES`; `a.b`: b in the object a.
    # Those in `sizes` must be there.
    sizes: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    # Those of them that may be 0.
    may_be_0: tuple[str, ...] = ()
    # Header keys whose value must be one of a few.
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Config values that are one header value divided by another.
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Tensors that have numbers for the config instead of weights.
    lists: Mapping[str, str] = field(default_factory=dict)
    # The tensor by which the frequencies of RoPE are divided, as in Llama 3.1.
    slowed: str = ""
    # Header keys that do not matter for a model of text.
    ignored: tuple[str, ...] = ()
    # Other header keys that must be there.
    needed: tuple[str, ...] = ()
    # Config values that the header lacks, because they are the same for all models.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Config values that say whether the file has a tensor whose name ends so.
    flags: Mapping[str, str] = field(default_factory=dict)
    # What the converter does to some tensors, by their whole name or without `.weight` or `.bias`.
    changes: dict[str, Change] = field(default_factory=dict)
    # The header key with the number of last layers that only predict further tokens (multi-token
    # prediction); these are not read.
    extra_layers: str = ""
    # Whether only the first `rope.dimension_count` numbers of a head may rotate.
    part_rotates: bool = False
    # The kind of the layers without key heads, in a file that lists each layer's key heads.
    state_kind: str = ""
    # Whether sliding-window layers have other sizes than the rest. The file then lists the sizes of
    # each layer, and some layers use the keys and values of others.
    varies_by_layer: bool = False
    # Where the config has how RoPE is scaled for long texts; empty if that is not supported.
    scaled: str = "rope_parameters"
    # A model of so many layers scales attention by the hidden size per head, not by `head_dim`.
    wide_layers: int = 0
    # Whether transformers has the experts' matrices transposed, with gate and up rows alternating.
    swaps_experts: bool = False


_QWEN35 = Architecture(
    "qwen3_5_text",
    _ATTENTION
    | _HEAD_NORMS
    | _GATED
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
    sizes={
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    ratios={"linear_value_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
    choices={"ssm.v_head_reordered": (True,)},
    ignored=("rope.dimension_sections", "ssm.inner_size"),
    needed=("ssm.inner_size", "rope.dimension_count"),
    changes=_PLUS_ONE
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
    extra_layers="nextn_predict_layers",
    part_rotates=True,
)


# For each architecture that sirchat reads, by its name in GGUF files: how such a file is read.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _DENSE, changes=_PAIRS, slowed="rope_freqs.weight"),
    "qwen2": Architecture("qwen2", _DENSE),
    "qwen3": Architecture("qwen3", _DENSE | _HEAD_NORMS),
    "gemma2": Architecture(
        "gemma2",
        _NORMS_BEFORE_AND_AFTER | _ATTENTION | _GATED,
        optional={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        may_be_0=("attn_logit_softcapping", "final_logit_softcapping"),
        changes=_PLUS_ONE,
        wide_layers=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _NORMS_BEFORE_AND_AFTER | _ATTENTION | _HEAD_NORMS | _GATED,
        sizes={"attention.sliding_window": "sliding_window"},
        optional={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
            "rope.local.freq_base": "rope_local_base_freq",
        },
        may_be_0=("final_logit_softcapping",),
        needed=("rope.freq_base",),
        scaled="rope_parameters.full_attention",
        changes=_PLUS_ONE,
        wide_layers=62,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _NORMS_BEFORE_AND_AFTER
        | _ATTENTION
        | _HEAD_NORMS
        | _GATED
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
        outer=PARTS_OUTSIDE_LAYERS
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "rope_freqs.weight": "",
        },
        sizes={
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "rope.freq_base": "rope_parameters.full_attention.rope_theta",
            "rope.freq_base_swa": "rope_parameters.sliding_attention.rope_theta",
        },
        optional={
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        may_be_0=(
            *("attention.shared_kv_layers", "embedding_length_per_layer_input"),
            *("final_logit_softcapping", *_MOE_SIZES),
        ),
        ignored=("attention.value_length_swa",),
        needed=(
            "attention.sliding_window_pattern",
            "rope.dimension_count",
            "rope.dimension_count_swa",
        ),
        fixed={
            "rope_parameters.full_attention.rope_type": "proportional",
            "rope_parameters.sliding_attention.rope_type": "default",
        },
        flags={"enable_moe_block": ".ffn_gate_inp.weight"},
        changes={"ffn_gate_up_exps": "gate and up", "ffn_down_exps": "down"},
        varies_by_layer=True,
        scaled="",
    ),
    "phi3": Architecture(
        "phi3",
        _NORMS
        | _GATE_IN_UP
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"},
        optional={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        may_be_0=("attention.sliding_window",),
        lists={"rope_factors_long.weight": _LONG, "rope_factors_short.weight": _SHORT},
        part_rotates=True,
    ),
    "smollm3": Architecture("smollm3", _DENSE, changes=_PAIRS, fixed={"no_rope_layer_interval": 4}),
    "olmo2": Architecture(
        "olmo2",
        _ATTENTION
        | _HEAD_NORMS
        | _GATED
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": Architecture(
        "granite",
        _DENSE,
        sizes={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        choices={"rope.scaling.finetuned": (True,)},  # without, nothing rotates
        changes=_PAIRS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _NORMS | _ATTENTION | _HEAD_NORMS | _EXPERTS,
        sizes=_MOE_SIZES,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        changes=_STACKED,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _NORMS | _ATTENTION | _EXPERTS | _SHARED_EXPERT,
        sizes=_MOE_SIZES | _SHARED_SIZE,
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        changes=_STACKED,
    ),
    "glm4": Architecture(
        "glm4",
        _ATTENTION
        | _GATE_IN_UP
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        needed=("rope.dimension_count",),
        flags={"attention_bias": ".attn_q.bias"},
        part_rotates=True,
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
        sizes={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        },
        optional={
            "expert_feed_forward_length": "intermediate_size",
        },
        fixed={"rope_parameters.truncate": False},
        changes=_STACKED,
        swaps_experts=True,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        layer=_QWEN35.layer | _EXPERTS | _SHARED_EXPERT,
        sizes={**_QWEN35.sizes, **_MOE_SIZES, **_SHARED_SIZE},
        changes=_QWEN35.changes | _STACKED,
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
        outer={
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
        },
        sizes={"shortconv.l_cache": "conv_L_cache"},
        optional={"attention.layer_norm_rms_epsilon": "norm_eps"},
        needed=("attention.head_count_kv",),
        fixed={"block_auto_adjust_ff_dim": False},
        flags={"conv_bias": ".shortconv.in_proj.bias"},
        state_kind="conv",
    ),
}
