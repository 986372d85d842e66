"""Context length and cache size of a model, from its files alone, without loading it.

Files are not trusted: invalid values count as unknown, and a file that can't be read raises
ModelError.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.file_checks import TensorSpan, read_tensor_spans
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.gguf.translate import config_values, has_blocks, refuse_unsupported
from sirchat.models.model_config import (
    REFUSED_LAYERS,
    ConfigValues,
    context_length,
    load_config,
    positive_int,
    refuse_invalid_numbers,
)
from sirchat.models.names import part_paths

_MAX_LAYERS = 10_000
_ATTENTION_LAYERS = (
    *("full_attention", "sliding_attention", "chunked_attention", "attention"),
    *("hybrid", "hybrid_sliding"),
)
# Types of models that are refused at loading, although their config does not show why.
_REFUSED_MODELS = ("gpt2", "opt", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "rwkv")
# Types of models whose config may not show which of their layers have keys and values.
_HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2")

_ElementCounts = tuple[int, int] | tuple[None, None]


_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
# What a config.json says of sizes that building the model would take memory for.
_LAYER_COUNT_KEY = "num_hidden_layers"
_SIZE_KEYS = [
    *(_LAYER_COUNT_KEY, "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("head_dim", "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"),
]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model as stated in its files; None for a size that they do not state."""

    kind: str  # the architecture, such as `llama`; of a GGUF file also the type of its weights
    context_length: int | None  # tokens that the model was trained for
    # Numbers that the KV cache stores of a token in all layers: values, and keys, which count
    # twice where they rotate: as first written, and as moved.
    row_elements: int | None
    stays_packed: bool = False  # on a device that can compute with packed weights
    archived_elements: int | None = None  # numbers that the archive stores of a token


def shape_of_folder(folder: Path) -> ModelShape:
    """Read a model's sizes from config.json; raises ModelError if unreadable or unsupported."""
    config = load_config(folder / "config.json")
    names = config.get("architectures")
    if isinstance(names, list) and names and not any("For" in str(name) for name in names):
        what = f"a {str(names[0])[:60]}, which does not generate text"
        raise ModelError(f"{folder} has {what}, but may serve as --recall-encoder")
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    kind = text.get("model_type") or config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{folder / 'config.json'} has no model_type")
    layers = _layer_types(text)
    is_refused = any(layer in REFUSED_LAYERS for layer in map(str, layers))
    is_refused |= bool(layers) and not any(layer in _ATTENTION_LAYERS for layer in layers)
    if kind in _REFUSED_MODELS or is_refused:
        raise ModelError(f"{folder} is of type {kind[:60]}; tokens can't be evicted from its cache")
    cached, archived = _count_elements(text)
    context = context_length(ConfigValues(text))
    return ModelShape(kind, context, cached, archived_elements=archived)


def shape_of_gguf(path: Path) -> ModelShape:
    """Read a model's sizes from a GGUF header; raises ModelError if damaged or unsupported."""
    file = parse_gguf(path, with_text_lists=False)
    refuse_unsupported(file)
    architecture, weights = file.architecture, Counter[str]()
    for tensor in file.tensors.values():
        weights[tensor.type] += prod(tensor.shape)
    kind = " ".join([architecture, *(name for name, _ in weights.most_common(1))])
    values = config_values(file)
    cached, archived = _count_elements(values)
    context = context_length(ConfigValues(values))
    return ModelShape(kind, context, cached, has_blocks(file), archived)


def cache_bytes(shape: ModelShape, profile: Profile, rows: int) -> int | None:
    """Bytes of a KV cache for `rows` tokens with a profile's settings; None if unknown."""
    if shape.row_elements is None:
        return None
    return shape.row_elements * rows * _item_size(shape, profile)


def archive_bytes(shape: ModelShape, profile: Profile, tokens: int) -> int | None:
    """Bytes of the archive for `tokens` tokens with a profile's settings; None if unknown."""
    if shape.archived_elements is None:
        return None
    return shape.archived_elements * tokens * _item_size(shape, profile)


def precision(shape: ModelShape, profile: Profile) -> str:
    """The form of the weights in memory: `packed`, `int8`, `int4`, or the name of a number type."""
    if profile.quantize in ("packed", "int8", "int4"):
        return profile.quantize
    is_default = profile.quantize == "auto" and profile.dtype == "auto"
    if is_default and shape.stays_packed:
        return "packed"
    return unpacked_type(profile)


def unpacked_type(profile: Profile) -> str:
    """The number type of weights that are not packed, by the rules of `devices.pick_dtype`."""
    if profile.dtype == "auto":
        return "float32" if uses_cpu(profile) else "bfloat16"
    return profile.dtype


def uses_cpu(profile: Profile) -> bool:
    """Whether a model computes on the CPU with a profile's settings."""
    return profile.device == "cpu" or (profile.device == "auto" and not _has_accelerator())


def compiler() -> list[str]:
    """This machine's C++ compiler as a command: $CXX, or g++, clang++ or zig; [] if none exists."""
    command = shlex.split(os.environ.get("CXX", ""))
    for name, *options in [command] if command else [["g++"], ["clang++"]]:
        if (path := shutil.which(name)) is not None:
            return [path, *options]
    if not command and find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return []


def _layer_types(config: Mapping[str, Any]) -> list[Any]:
    listed = config.get("layer_types")
    interval = positive_int(config.get("full_attention_interval"))
    layers = positive_int(config.get("num_hidden_layers"), _MAX_LAYERS)
    if listed is None and layers and interval:
        numbers = range(1, layers + 1)
        return ["none" if number % interval else _ATTENTION_LAYERS[0] for number in numbers]
    return listed if isinstance(listed, list) else []


def _count_elements(config: Mapping[str, Any]) -> _ElementCounts:
    """Count a token's numbers in the KV cache, and in the archive, over all layers."""
    kinds = _layer_types(config)
    layers = positive_int(config.get("num_hidden_layers") or config.get("n_layer"), _MAX_LAYERS)
    if config.get("model_type") == "longcat_flash":  # two attention layers in each layer
        layers = 2 * (positive_int(config.get("num_layers"), _MAX_LAYERS) or 0) or None
    heads = positive_int(config.get("num_attention_heads") or config.get("n_head"))
    hidden = positive_int(config.get("hidden_size") or config.get("n_embd"))
    is_unknown_hybrid = not kinds and config.get("model_type") in _HYBRIDS
    if layers is None or heads is None or is_unknown_hybrid:
        return None, None
    # The last layers may use others' keys; the others than those with rows have a constant state.
    layers -= positive_int(config.get("num_kv_shared_layers")) or 0
    kinds = [*kinds[:layers], *([_ATTENTION_LAYERS[0]] * (layers - len(kinds)))]
    latent = positive_int(config.get("kv_lora_rank"))
    if latent is not None:  # DeepSeek: a compressed part and a rotated part
        rotated_part = positive_int(config.get("qk_rope_head_dim")) or 0
        count = sum(kind in _ATTENTION_LAYERS for kind in kinds)
        return count * (latent + 2 * rotated_part), count * (latent + rotated_part)
    size = positive_int(config.get("head_dim")) or (hidden // heads if hidden else None)
    if not size:  # unknown, or more heads than numbers
        return None, None
    keys = _key_value_heads(config, heads) * size
    # Gemma 4: of layers that see all
    full_keys = positive_int(config.get("global_head_dim")) or size
    full_keys *= positive_int(config.get("num_global_key_value_heads")) or keys // size
    interval = positive_int(config.get("no_rope_layer_interval")) or layers + 1
    listed = config.get("no_rope_layers")  # 1 for a layer with positions, despite its name
    has_rope = listed if isinstance(listed, list) else []
    has_rope = [*has_rope, *((i + 1) % interval for i in range(len(has_rope), layers))]
    sizes = dict.fromkeys(_ATTENTION_LAYERS, 2 * keys) | {_ATTENTION_LAYERS[0]: 2 * full_keys}
    archived = [sizes.get(str(kind), 0) for kind in kinds]
    pairs = zip(archived, has_rope, strict=False)
    return sum(row * 3 // 2 if rotates else row for row, rotates in pairs), sum(archived)


def _key_value_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture") is True:  # Falcon: the cache has one for each head
        return heads
    if config.get("multi_query") is True:
        return 1
    counts = (positive_int(config.get(name)) for name in ("num_key_value_heads", "num_kv_heads"))
    return next((count for count in counts if count), heads)


def _item_size(shape: ModelShape, profile: Profile) -> int:
    """Bytes of one number in the KV cache, by the rules of `LoadedModel.cache_dtype`."""
    kind: str = profile.cache_dtype
    if kind == "auto":
        kind = precision(shape, profile) if uses_cpu(profile) else unpacked_type(profile)
    return 4 if kind == "float32" else 2


def _has_accelerator() -> bool:
    # Not asked of torch, because importing it would take seconds.
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hides_gpus or not Path("/dev/nvidiactl").exists():
        return False
    with suppress(PackageNotFoundError):
        return not version("torch").endswith("+cpu")
    return False


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    type: str  # such as `BF16` or `Q4_1`

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def is_head(self) -> bool:
        return self.name.endswith(_HEADS) or self.name == "output.weight"

    @property
    def is_embedding(self) -> bool:
        return self.name.endswith(_EMBEDDINGS) or self.name == "token_embd.weight"

    @property
    def is_matrix(self) -> bool:
        """Whether `--quantize` can round the tensor: a linear layer's matrix, but no expert's."""
        is_linear = len(self.shape) == 2 and self.name.endswith(".weight")
        return is_linear and not self.is_embedding and ".experts." not in self.name


@dataclass(frozen=True)
class StoredWeights:
    tensors: tuple[StoredTensor, ...]  # without an output head that equals the input embeddings
    is_tied: bool  # whether the output head has the weights of the input embeddings
    is_gguf: bool = False

    @property
    def count(self) -> int:
        """The number of weights (parameters) of the model."""
        return sum(tensor.count for tensor in self.tensors)


def stored_weights(path: Path) -> StoredWeights:
    """List the weights in a GGUF file or a folder; raises ModelError if it can't be read."""
    if path.is_file():
        file = parse_gguf(path, with_text_lists=False)
        tensors = tuple(StoredTensor(n, t.shape, t.type) for n, t in file.tensors.items())
        is_tied = not any(tensor.is_head for tensor in tensors)
        return StoredWeights(tensors, is_tied, is_gguf=True)
    config = load_config(path / "config.json")
    places = weights_in_folder(path)
    tensors = tuple(StoredTensor(n, one.shape, one.type) for n, (_, one) in places.items())
    says_tied = config.get("tie_word_embeddings") is True
    is_tied = says_tied or not any(tensor.is_head for tensor in tensors)
    if says_tied:
        tensors = tuple(tensor for tensor in tensors if not tensor.is_head)
    return StoredWeights(tensors, is_tied)


def weights_in_folder(folder: Path) -> dict[str, tuple[Path, TensorSpan]]:
    """The weights in a folder's safetensors files: for each name the file, and its place there.

    Raises ModelError if a file is missing, damaged or of another kind.
    """
    for path in folder.iterdir():  # a pipe would be waited for, and /dev/zero read without end
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise ModelError(f"{path} is a device or a pipe, not a regular file")
    files, config = _weight_files(folder), load_config(folder / "config.json")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} has only some of its weights; missing: {', '.join(missing)}",
            hint="the download is incomplete",
        )
    spans = ((file, read_tensor_spans(file)) for file in files)
    found = {name: (file, span) for file, named in spans for name, span in named.items()}
    _refuse_larger_config(folder, config, found)
    text = config.get("text_config")
    refuse_invalid_numbers(ConfigValues(text if isinstance(text, dict) else config), str(folder))
    return found


def _refuse_larger_config(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, tuple[Path, TensorSpan]]
) -> None:
    """Raise ModelError if config.json states larger sizes than the weights can have."""
    largest = max((size for _, place in weights.values() for size in place.shape), default=0)
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in _SIZE_KEYS:
            size = part.get(name)
            most = len(weights) if name == _LAYER_COUNT_KEY else max(largest, 1024)
            if weights and isinstance(size, int) and size > most:
                what = "weights" if name == _LAYER_COUNT_KEY else "rows in the largest weight"
                said = f"{folder / 'config.json'} says {name}: {size:,}"
                raise ModelError(f"{said}; the files have {most:,} {what}")


def _weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers loads; a repository may have the weights twice."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not index.exists():
        return sorted({part for file in folder.glob("*.safetensors") for part in part_paths(file)})
    files = load_config(index).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    return [folder / Path(name).name for name in sorted(names)]
