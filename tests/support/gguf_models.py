"""Small random models of many architectures, written as GGUF files as llama.cpp's converter does.

The names of the tensors are those that ggml's own package gives for the names in transformers; how
weights are changed is written down here a second time, apart from the code that reads them.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sirchat.models.gguf.header import GgufTensor
from sirchat.models.gguf.prepared import WRITER_THREAD

_CONFIGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = _CONFIGS["models"]
VOCABULARY: int = _CONFIGS["sizes"]["vocab_size"]
# Gives the type to store a tensor in, by its name and shape.
KindOf = Callable[[str, tuple[int, ...]], str]
# Where random blocks have floats of two bytes, and which.
_HALVES = {
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 1e-4},
    "IQ4_NL": {0: 2e-3},
}
# Where blocks of each format have floats of two bytes.
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(
        ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "IQ2_S"), (0,)
    ),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ2_0": (64,),
    "MXFP4": (),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def floats_only(name: str, shape: tuple[int, ...]) -> str:
    return "F32"


def few_bits(name: str, shape: tuple[int, ...]) -> str:
    """Two types of blocks for matrices, float32 for all else, as llama.cpp stores it."""
    if len(shape) < 2 or shape[-1] % 32 or name.endswith(("gate_inp.weight", "bias")):
        return "F32"
    return "Q8_0" if "down" in name or "embd" in name else "Q4_0"


_WORDS = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
_MERGES = [*_WORDS, "( hello", "1 2", "12 3", "123 4", "Ġ Ġ"]
_PIECES = ["▁he", "▁hello", "llo", "▁wo", "▁world", "ld", "ll", "he", "wo", "or", "rld", "lo"]
_CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def config_of(case: str, **more: Any) -> Any:
    """The transformers config of a case; `more` replaces values."""
    _, model_type, values = MODELS[case]
    return CONFIG_MAPPING[model_type](**copy.deepcopy({**_CONFIGS["sizes"], **values, **more}))


def random_model(case: str, **more: Any) -> Any:
    """A transformers model with random weights, biases and norms."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config_of(case, **more)).eval()
    for _, parameter in _weights(module):
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def _weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and what Gemma 4 has beside them."""
    yield from module.named_parameters()
    yield from ((n, one) for n, one in module.named_buffers() if n.endswith("layer_scalar"))


def write_model(
    path: Path, module: Any, case: str, kind_of: KindOf, tensors_of_part: int = 0
) -> Path:
    """Write a model and a small tokenizer to `path`; its weights become those that are stored.

    Matrices whose type is a K type such as `Q4_K` are filled with random blocks. With
    `tensors_of_part` it is split into parts of so many tensors beside `path`.
    """
    architecture = MODELS[case][0]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_of_part)
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
    return finish(writer, path)


def finish(writer: Any, path: Path) -> Path:
    """Write all that was added; returns the path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(module: Any, architecture: str) -> dict[str, Tensor]:
    """The weights of a model under their GGUF names, and as they are stored."""
    pieces = _pieces(module, architecture)
    return {one.name: one.parameter.data.view(-1)[one.places] for one in pieces}


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


def add_settings(writer: Any, module: Any, architecture: str) -> None:
    """Write the sizes and settings of a model."""
    config: Any = module.config
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
    partly = ("phi3", "glm4", "qwen35", "qwen35moe")
    if architecture in ("llama", "smollm3", "granite", *partly):
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


def add_byte_pairs(writer: Any, size: int, pre: str = "llama-bpe") -> None:
    """Add a vocabulary of `size` tokens: bytes and merged bytes, as of GPT-2."""
    merged = [one.replace(" ", "") for one in _MERGES]
    tokens = [*_CONTROL, *bytes_to_unicode().values(), *merged]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges(_MERGES)
    _add(writer, tokens, [gguf.TokenType.NORMAL] * (len(tokens) - len(_CONTROL)), size)


def add_sentence_pieces(writer: Any, size: int, kind: str = "llama") -> None:
    """Add a vocabulary of `size` tokens: bytes, letters and pieces of words with scores.

    `kind` is how the file calls this kind of vocabulary: `llama` or `gemma4`.
    """
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, *letters]
    kinds = [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(_PIECES) + len(letters))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(at) for at in range(size)])
    if kind == "gemma4":
        words = [*_PIECES, *letters]
        splits = [(word[:at], word[at:]) for word in _PIECES for at in range(1, len(word))]
        writer.add_token_merges([" ".join(pair) for pair in splits if set(pair) <= set(words)])
    _add(writer, tokens, kinds, size)


def _add(writer: Any, tokens: list[str], kinds: list[Any], size: int) -> None:
    unused = [f"[PAD{at}]" for at in range(len(tokens), size)]
    control = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * (len(_CONTROL) - 1)
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*control, *kinds, *[gguf.TokenType.UNUSED] * len(unused)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def random_blocks(kind: str, rows: int, rng: np.random.Generator, columns: int = 512) -> GgufTensor:
    """A matrix of blocks with all values of their bits, and with floats of usual sizes."""
    each, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, columns // each, size), np.uint8)
    for at in HALVES[kind]:
        floats = rng.normal(0, 1e-2, data.shape[:2]).astype(np.float16)
        data[:, :, at : at + 2] = floats[..., None].view(np.uint8)
    return GgufTensor((rows, columns), kind, data.reshape(-1))


def wait_for_writer() -> None:
    """Wait until the prepared file of a model that was loaded is written."""
    for thread in threading.enumerate():
        if thread.name == WRITER_THREAD:
            thread.join()
