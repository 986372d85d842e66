"""A model's weights as its files store them, read from headers alone.

Files are not trusted; a file that can't be read raises ModelError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sirchat.errors import ModelError
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.gguf.translate import is_supported
from sirchat.models.shape import load_config

_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a model's file: its name, its shape and its type, such as `BF16` or `Q4_1`."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def count(self) -> int:
        """The number of values."""
        return prod(self.shape)

    @property
    def count_at_once(self) -> int:
        """The number of values that are packed or unpacked at a time: of experts, those of one."""
        return prod(self.shape[-2:])

    @property
    def is_head(self) -> bool:
        """Whether this is the model's output head."""
        return self.name.endswith(_HEADS) or self.name == "output.weight"

    @property
    def is_embedding(self) -> bool:
        """Whether this is the matrix of the model's input embeddings."""
        return self.name.endswith(_EMBEDDINGS) or self.name == "token_embd.weight"

    @property
    def is_table(self) -> bool:
        """Whether it has a row for each token: embeddings, also those of Gemma 4's layers."""
        return self.is_embedding or self.name == "per_layer_token_embd.weight"

    @property
    def is_matrix(self) -> bool:
        """Whether it is a linear layer's matrix, which `--quantize` can round; not of experts."""
        is_linear = len(self.shape) == 2 and self.name.endswith(".weight")
        return is_linear and not self.is_table and ".experts." not in self.name


@dataclass(frozen=True)
class StoredWeights:
    """A model's weights as its files store them.

    Attributes:
        tensors: all tensors, without an output head that equals the input embeddings.
        is_tied: whether the output head has the weights of the input embeddings.
        is_read_here: whether sirchat itself can read the GGUF file, and not transformers.
    """

    tensors: tuple[StoredTensor, ...]
    is_tied: bool
    is_gguf: bool = False
    is_read_here: bool = False

    @property
    def count(self) -> int:
        """The number of weights (parameters) of the model."""
        return sum(tensor.count for tensor in self.tensors)


def stored_weights(path: Path) -> StoredWeights:
    """List the weights of a model from the headers of its GGUF file or its folder.

    Raises ModelError if the files can't be read.
    """
    if path.is_file():
        file = parse_gguf(path, with_lists_of_text=False)
        tensors = tuple(StoredTensor(n, t.shape, t.type) for n, t in file.tensors.items())
        is_tied = not any(tensor.is_head for tensor in tensors)
        return StoredWeights(tensors, is_tied, True, is_supported(file))
    config = load_config(path / "config.json")
    tensors = tuple(tensor for file in _weight_files(path) for tensor in _tensors_in(file))
    says_tied = config.get("tie_word_embeddings") is True
    is_tied = says_tied or not any(tensor.is_head for tensor in tensors)
    if says_tied:
        tensors = tuple(tensor for tensor in tensors if not tensor.is_head)
    return StoredWeights(tensors, is_tied)


def _weight_files(folder: Path) -> list[Path]:
    """The files whose weights transformers loads; a repository may have the weights twice."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    files = load_config(index).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    return [folder / Path(name).name for name in sorted(names)]


def _tensors_in(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="np") as file:  # which reads, and checks, the header only
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                tensor = file.get_slice(name)
                yield StoredTensor(name, tuple(tensor.get_shape()), tensor.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} can't be read: {type(error).__name__}") from error
