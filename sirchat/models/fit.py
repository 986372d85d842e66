"""How much memory a model takes, and the largest budget that fits, from its files alone.

Only headers and config files are read: no weights are loaded. Files are not trusted; a file that
can't be read raises ModelError.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sirchat.config.profile import Profile, parse_size
from sirchat.errors import ModelError, UsageError, format_value
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, parse_gguf
from sirchat.models.gguf.translate import is_supported
from sirchat.models.layout import GPU_RESERVE, DeviceRoom, ModelPart, lay_out
from sirchat.models.listing import FoundModel
from sirchat.models.shape import (
    MOST_UNPACKED,
    ModelShape,
    archive_bytes,
    cache_bytes,
    load_config,
    packed_rows,
    precision,
    uses_cpu,
)

PROGRAM = 500_000_000
"""Bytes for Python, torch and transformers without a model: 0.4 GB, as measured, and a margin."""

TOKENS_PER_HOUR = 10_000
"""The number of tokens in one hour of talk: about 130 words a minute, with 1.3 tokens each."""

BUDGETS = (1024, 4096, 16384)

_MOST_HEADER = 100_000_000  # most bytes of a header, as in the safetensors library
_MOST = 1 << 40
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|blk)\.(\d+)\.")
_DEVICES = re.compile(r"(?:(\d{1,3})x)?(.+)", re.IGNORECASE)
_MOST_DEVICES = 1024


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a model's file: its name, its shape and its type, such as `BF16` or `Q4_1`."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def count(self) -> int:
        """The number of values in this tensor."""
        return prod(self.shape)

    @property
    def at_once(self) -> int:
        """The number of this tensor's values that are packed or unpacked at the same time.

        In a tensor with the matrices of several experts, these are the values of one expert; in any
        other tensor, all values.
        """
        return prod(self.shape[-2:])

    @property
    def is_head(self) -> bool:
        """Whether this tensor is the model's output head."""
        return self.name.endswith(_HEADS) or self.name == "output.weight"

    @property
    def is_embedding(self) -> bool:
        """Whether this tensor is the matrix of the model's input embeddings."""
        return self.name.endswith(_EMBEDDINGS) or self.name == "token_embd.weight"

    @property
    def is_matrix(self) -> bool:
        """Whether this tensor is the matrix of a linear layer, which `--quantize` can round.

        Matrices of experts and of embeddings do not count.
        """
        is_linear = len(self.shape) == 2 and self.name.endswith(".weight")
        return is_linear and not self.is_table and ".experts." not in self.name

    @property
    def is_table(self) -> bool:
        """Whether this tensor has a row for each token of the vocabulary.

        Such tensors are the input embeddings, and the embeddings that Gemma 4 has for its layers.
        """
        return self.is_embedding or self.name == "per_layer_token_embd.weight"


@dataclass(frozen=True)
class StoredWeights:
    """A model's weights as its files store them.

    Attributes:
        tensors: all tensors, without an output head that equals the input embeddings.
        is_tied: whether the output head has the weights of the input embeddings.
        is_gguf: whether the weights are in a GGUF file.
        is_read_here: whether sirchat itself can read the GGUF file; otherwise transformers reads
            it.
    """

    tensors: tuple[StoredTensor, ...]
    is_tied: bool
    is_gguf: bool = False
    is_read_here: bool = False

    @property
    def count(self) -> int:
        """The number of weights (parameters) in all tensors of the model."""
        return sum(one.count for one in self.tensors)


@dataclass(frozen=True)
class Choice:
    """The memory that a model takes with one choice of settings; sizes are bytes, None if unknown.

    Attributes:
        setting: the option to type for this choice, such as `--dtype float32`; empty for the
            present settings.
        precision: the form of the weights in memory, such as `packed` or `float32`.
        weights: size of the weights.
        loading: the most memory that the weights take while they are loaded.
        working: memory that is needed only while a text is read, besides weights and KV cache.
        caches: for each of several budgets, in tokens, the size of the KV cache.
        archive: size of the archive for the tokens of one hour of talk, `TOKENS_PER_HOUR`.
        largest_budget: the most tokens whose KV cache fits in the free memory, at most the model's
            context; 0 if the model does not fit; None if unknown.
    """

    setting: str
    precision: str
    weights: int
    loading: int
    working: int
    caches: Mapping[int, int | None]
    archive: int | None
    largest_budget: int | None


@dataclass(frozen=True)
class ModelFit:
    """The memory that a model takes with several choices of settings, and how much is free.

    Attributes:
        found: the model's files.
        weights: the number of the model's weights.
        free: bytes of free memory; None if unknown.
        choices: the memory with each choice of settings, the present settings first.
    """

    found: FoundModel
    weights: int
    free: int | None
    choices: tuple[Choice, ...]


def fit_of(found: FoundModel, profile: Profile, free: int | None) -> ModelFit:
    """Compute the memory that a model takes with several choices of settings.

    The first choice has the settings of the profile. `free` is the free memory, in bytes. Raises
    ModelError if the model's files can't be read.
    """
    if found.shape is None or found.path is None:
        raise ModelError(f"model {found.name!r} {found.problem or 'has no files'}")
    stored, shape = stored_weights(found.path), found.shape
    first = _choice("", stored, shape, profile, free)
    choices = {first.precision: first}
    for setting, other in _others(stored, shape, profile):
        choices.setdefault(precision(shape, other), _choice(setting, stored, shape, other, free))
    return ModelFit(found, stored.count, free, tuple(choices.values()))


def _others(
    stored: StoredWeights, shape: ModelShape, profile: Profile
) -> Iterator[tuple[str, Profile]]:
    """Yield other settings than those of the profile: the option to type, and a changed profile."""
    wanted = [("dtype", "float32"), ("dtype", "bfloat16")]
    if uses_cpu(profile):
        packed = [("quantize", "packed")] if shape.stays_packed else []
        four = [("quantize", "int4")] if packed_rows() else []
        wanted = [*packed, *wanted, ("quantize", "int8"), *four]
    for name, value in wanted:
        changes = {"dtype": "auto", "quantize": "auto", name: value}
        yield f"--{name} {value}", profile.model_copy(update=changes)


@dataclass(frozen=True)
class Layout:
    """How the parts of a model would lie on several GPUs.

    Attributes:
        budget: number of tokens in the full KV cache.
        precision: the form of the weights in memory, such as `bfloat16`.
        devices: for each GPU, its memory in bytes, and the parts of the model on it, in order.
        left: the parts that do not fit on the GPUs.
        knows_cache: whether the size of the KV cache is known; if not, the cache counts as 0 bytes.
    """

    budget: int
    precision: str
    devices: tuple[tuple[int, tuple[ModelPart, ...]], ...]
    left: tuple[ModelPart, ...]
    knows_cache: bool

    @property
    def fits(self) -> bool:
        """Whether all parts of the model fit on the GPUs."""
        return not self.left


def parse_devices(text: str) -> list[int]:
    """Read the memory of each GPU, in bytes, from a text such as `2x24GB` or `24GB,8GB`.

    Raises UsageError for any other text.
    """
    sizes = list[int]()
    for one in text.split(","):
        found = _DEVICES.fullmatch(one.strip())
        size = parse_size(found[2]) if found else None
        count = int(found[1] or 1) if found else 0
        if size is None or not 0 < count <= _MOST_DEVICES - len(sizes):
            raise UsageError(
                f"--devices {format_value(text)} is not a list of devices",
                hint="give their memory, such as 2x24GB or 24GB,8GB",
            )
        sizes += [size] * count
    return sizes


def layout_of(
    found: FoundModel, profile: Profile, devices: Sequence[int], budget: int, *, even: bool
) -> Layout:
    """Compute which parts of a model would lie on which GPU.

    `devices` is the memory of each GPU, in bytes. The KV cache is counted as full, with `budget`
    tokens. Each GPU is filled before the next one is used, as with `--device-map auto`. If `even`,
    all GPUs get equally much, as with `--device-map balanced`. Raises ModelError if the model's
    files can't be read.
    """
    if found.shape is None or found.path is None:
        raise ModelError(f"model {found.name!r} {found.problem or 'has no files'}")
    profile = profile.model_copy(update={"device": "cuda", "quantize": "none"})
    shape, stored = found.shape, stored_weights(found.path)
    parts = _parts(stored, shape, profile, budget)
    rooms = [DeviceRoom(f"cuda:{at}", size - GPU_RESERVE) for at, size in enumerate(devices)]
    laid = lay_out(parts, [*rooms, DeviceRoom("", None)], even=len(rooms) if even else 0)
    *held, left = laid or [parts]
    on_devices = zip(devices, map(tuple, held), strict=True)
    knows = shape.layer_elements is not None
    return Layout(budget, precision(shape, profile), tuple(on_devices), tuple(left), knows)


def _parts(
    stored: StoredWeights, shape: ModelShape, profile: Profile, budget: int
) -> list[ModelPart]:
    """List the parts of a model, in order: embeddings, layers, output.

    Each part has the bytes of its weights, and those of its keys and values for `budget` tokens.
    """
    held = precision(shape, profile)
    item, sizes = _item(held, profile), dict[int, int]()
    for one in stored.tensors:
        layer = _LAYER.search(one.name)
        at = int(layer[1]) if layer else -1 if one.is_table else _MOST_LAYERS
        sizes[at] = sizes.get(at, 0) + _tensor_bytes(one, _bits(one, stored, held), item)
    names = {-1: "embeddings", _MOST_LAYERS: "output"}
    row, elements = cache_bytes(shape, profile, budget) or 0, shape.layer_elements or ()
    caches = {at: row * one // max(1, sum(elements)) for at, one in enumerate(elements)}
    return [
        ModelPart(names.get(at, str(at)), size, caches.get(at, 0))
        for at, size in sorted(sizes.items())
    ]


_MOST_LAYERS = 10**6


def _item(held: str, profile: Profile) -> int:
    """Bytes of one weight that is not packed: 2 or 4.

    `held` is the form of the weights in memory, such as `packed` or `bfloat16`.
    """
    return 2 if {"float16", "bfloat16"} & {held, profile.dtype} else 4


def _choice(
    setting: str, stored: StoredWeights, shape: ModelShape, profile: Profile, free: int | None
) -> Choice:
    held = precision(shape, profile)
    item = _item(held, profile)
    weights, limit = _bytes(stored, held, item), shape.context_length
    budgets = {
        *(one for one in BUDGETS if limit is None or one < limit),
        *([limit] if limit else []),
    }
    loading, working = _while_loading(stored, held, item), _while_reading(stored, held)
    row = cache_bytes(shape, profile, 1)
    largest = None
    if free is not None and row is not None and uses_cpu(profile):
        rows = (free - PROGRAM - weights - working) // row
        fits = rows > 0 and PROGRAM + loading <= free
        largest = min(rows, limit or rows) if fits else 0
    return Choice(
        setting,
        held,
        weights,
        loading,
        working,
        {one: cache_bytes(shape, profile, one) for one in sorted(budgets)},
        archive_bytes(shape, profile, TOKENS_PER_HOUR),
        largest,
    )


def _bytes(stored: StoredWeights, held: str, item: int) -> int:
    """Bytes that all weights of a model take in memory.

    `held` is the form of the weights in memory, such as `packed`. A weight that is not packed takes
    `item` bytes.
    """
    return sum(_tensor_bytes(one, _bits(one, stored, held), item) for one in stored.tensors)


def _tensor_bytes(tensor: StoredTensor, bits: int | None, item: int) -> int:
    if bits == 4:  # and two numbers of 16 bits for each 32 weights
        return tensor.count * 5 // 8
    if bits == 8:
        return tensor.count + 2 * prod(tensor.shape[:-1])
    return tensor.count * item


def _bits(tensor: StoredTensor, stored: StoredWeights, held: str) -> int | None:
    """The number of bits of each weight, 4 or 8, if the tensor will be packed; otherwise None.

    `held` is the form of the weights in memory, such as `packed`. The rules are those of
    `gguf.model` and of `packing.pack_module`.
    """
    if held == "packed":
        if len(tensor.shape) < 2 or BLOCKS.get(tensor.type, (0, 1))[1] == 1:
            return None
        wants_four = tensor.type in FOUR_BIT and not (tensor.is_table or tensor.is_head)
    elif held in ("int8", "int4"):
        if not tensor.is_matrix and not (stored.is_tied and tensor.is_embedding):
            return None
        wants_four = held == "int4" and tensor.is_matrix and not tensor.is_head
    else:
        return None
    rows, columns = tensor.shape[-2:]
    if ".ffn_gate_up_exps." in tensor.name:  # becomes two layers
        rows //= 2
    block = packed_rows()
    fits = block > 0 and rows % block == 0 and columns % 32 == 0
    return 4 if wants_four and fits else 8


def _while_loading(stored: StoredWeights, held: str, item: int) -> int:
    """The most bytes that a model's weights take in memory while they are loaded.

    Pages of the file that the system maps into memory do not count. The factors below were
    measured: they are the bytes per weight that a matrix takes while it is packed.
    """
    largest = max((one.count for one in stored.tensors), default=0)
    weights = _bytes(stored, held, item)
    if held == "packed":
        factors = {4: 11, 8: 3, None: 4}
        taken = (factors[_bits(one, stored, held)] * one.at_once for one in stored.tensors)
        return weights + max(taken, default=0)
    if stored.is_gguf and not stored.is_read_here:  # transformers has all of them twice
        return 2 * 4 * stored.count
    if held in ("int8", "int4"):  # all are unpacked, then packed one by one
        return item * stored.count + 10 * largest
    return weights + (4 * largest if stored.is_gguf else 0)


def _while_reading(stored: StoredWeights, held: str) -> int:
    """Bytes that unpacked copies (bfloat16) of packed matrices take while a text is read."""
    packed = [one for one in stored.tensors if _bits(one, stored, held)]
    whole = 2 * sum(one.count for one in packed)
    return whole if whole <= MOST_UNPACKED else 2 * max(one.at_once for one in packed)


def stored_weights(path: Path) -> StoredWeights:
    """List the weights of a model from the headers of its GGUF file or its folder.

    Raises ModelError if the files can't be read.
    """
    if path.is_file():
        file = parse_gguf(path, with_lists_of_text=False)
        tensors = tuple(StoredTensor(n, t.shape, t.type) for n, t in file.tensors.items())
        is_tied = not any(one.is_head for one in tensors)
        return StoredWeights(tensors, is_tied, True, is_supported(file))
    config = load_config(path / "config.json")
    tensors = tuple(one for file in _weight_files(path) for one in _tensors_in(file))
    says_tied = config.get("tie_word_embeddings") is True
    is_tied = says_tied or not any(one.is_head for one in tensors)
    if says_tied:
        tensors = tuple(one for one in tensors if not one.is_head)
    return StoredWeights(tensors, is_tied)


def _weight_files(folder: Path) -> list[Path]:
    """The files in a model's folder whose weights transformers loads; other files do not count."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    files = load_config(index).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    return [folder / Path(name).name for name in sorted(names)]


def _tensors_in(path: Path) -> Iterator[StoredTensor]:
    """Yield the name, shape and type of each tensor in a safetensors file, from its header."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MOST_HEADER, path.stat().st_size):
                raise ModelError(f"{path} can't be read: its header is too long")
            header = json.loads(file.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                yield StoredTensor(name, _shape(about), str(about["dtype"]))
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{path} can't be read: {type(error).__name__}") from error
    except struct.error as error:
        raise ModelError(f"{path} can't be read: it is too short") from error


def _shape(about: Mapping[str, Any]) -> tuple[int, ...]:
    shape = about["shape"]
    if not isinstance(shape, list) or not isinstance(about["dtype"], str):
        raise TypeError
    if not all(isinstance(one, int) and one >= 0 for one in shape) or prod(shape) > _MOST:
        raise ValueError
    return tuple(shape)
