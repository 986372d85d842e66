"""A model's weights as its files store them, read from headers alone.

Files are not trusted; a file that can't be read raises ModelError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sirchat.errors import ModelError
from sirchat.models.file_checks import TensorSpan, read_tensor_spans
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.model_config import ConfigValues, load_config, refuse_invalid_sizes
from sirchat.models.names import part_names

_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
# What a config.json says of sizes that building the model would take memory for.
_LAYER_COUNT_KEY = "num_hidden_layers"
_SIZE_KEYS = [
    *(_LAYER_COUNT_KEY, "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("head_dim", "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"),
]


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
    refuse_invalid_sizes(ConfigValues(text if isinstance(text, dict) else config), str(folder))
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
        names = {part for file in folder.glob("*.safetensors") for part in part_names(file.name)}
        return [folder / name for name in sorted(names)]
    files = load_config(index).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    return [folder / Path(name).name for name in sorted(names)]
