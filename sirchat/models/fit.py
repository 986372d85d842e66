"""How much memory a model takes, and the largest budget that fits, from its files alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.gguf.header import BLOCK_LAYOUTS, BLOCKS, FOUR_BIT, BlockLayout
from sirchat.models.listing import FoundModel
from sirchat.models.shape import (
    ModelShape,
    archive_bytes,
    cache_bytes,
    machine_int4_block_rows,
    precision,
    unpacked_type,
    uses_cpu,
    uses_native_products,
)
from sirchat.models.stored_weights import StoredTensor, StoredWeights, stored_weights

# Bytes for Python, torch and transformers without a model: 0.4 GB, as measured, and a margin.
PROGRAM_BYTES = 500_000_000
# An hour of talk: about 130 words a minute, with 1.3 tokens each.
TOKENS_PER_HOUR = 10_000
SHOWN_TOKENS = 1024  # of a budget, for which the size of the KV cache is told


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes of memory that a model takes with one choice of settings; None if unknown."""

    setting: str  # the option to type, such as `--dtype float32`; empty for the present settings
    precision: str  # of the weights in memory, such as `packed` or `float32`
    weights: int
    loading: int  # the most that the weights take while they are loaded
    cache: int | None  # of `SHOWN_TOKENS` tokens
    archive: int | None  # of `TOKENS_PER_HOUR` tokens
    largest_budget: int | None  # tokens that fit, at most the context; 0 if the model doesn't fit


class _WeightLayout(NamedTuple):
    precision: str  # what `shape.precision` returns
    item: int  # bytes of one weight that is not packed
    block: int  # rows that are packed in four bits together; 0: four bits are not possible
    uses_native_products: bool


@dataclass(frozen=True)
class ModelFit:
    """The memory that a model takes with several choices of settings, the present one first."""

    found: FoundModel
    weights: int  # how many the model has
    free: int | None  # bytes of free memory; None if unknown
    choices: tuple[MemoryNeed, ...]


def compute_fit(found: FoundModel, profile: Profile, free: int | None) -> ModelFit:
    """The memory that a model takes with the profile's settings, and with some other settings.

    `free` is the free memory in bytes. Raises ModelError if the model's files can't be read.
    """
    stored, shape = _read_files(found)
    first = _make_choice("", stored, shape, profile, free)
    choices = {first.precision: first}
    for setting, other in _other_settings(shape, profile):
        choice = _make_choice(setting, stored, shape, other, free)
        choices.setdefault(choice.precision, choice)
    return ModelFit(found, stored.count, free, tuple(choices.values()))


def recommend_model(free: int | None, *, on_cpu: bool) -> dict[str, Any]:
    """The largest model in `recommended.yaml` that fits `free` bytes; the smallest if none fits."""
    path = Path(__file__).with_name("recommended.yaml")
    models: list[dict[str, Any]] = yaml.safe_load(path.read_text("utf-8"))
    quick = [model for model in models if not (on_cpu and model["slow_on_cpu"])]
    return next((one for one in reversed(quick) if one["memory"] <= (free or 0)), models[0])


def _read_files(found: FoundModel) -> tuple[StoredWeights, ModelShape]:
    if found.shape is None or found.path is None:
        raise ModelError(f"model {found.name!r} {found.problem or 'has no files'}")
    return stored_weights(found.path), found.shape


def _other_settings(shape: ModelShape, profile: Profile) -> Iterator[tuple[str, Profile]]:
    """Yield alternatives to the profile: the option that a user types, and the changed profile."""
    packed = [("quantize", "packed")] if shape.stays_packed else []
    unpacked = [("dtype", "float32"), ("dtype", "bfloat16")]
    for name, value in [*packed, *unpacked, ("quantize", "int8"), ("quantize", "int4")]:
        changes = {"dtype": "auto", "quantize": "auto", name: value}
        yield f"--{name} {value}", profile.model_copy(update=changes)


def _make_choice(
    setting: str, stored: StoredWeights, shape: ModelShape, profile: Profile, free: int | None
) -> MemoryNeed:
    layout = _weight_layout(shape, profile)
    weights, limit = _weight_bytes(stored, layout), shape.context_length
    loading, row = _bytes_while_loading(stored, layout), cache_bytes(shape, profile, 1)
    largest = None
    if free is not None and row and uses_cpu(profile):
        rows = (free - PROGRAM_BYTES - weights) // row
        fits = rows > 0 and PROGRAM_BYTES + loading <= free
        largest = min(rows, limit or rows) if fits else 0
    return MemoryNeed(
        setting,
        layout.precision,
        weights,
        loading,
        cache_bytes(shape, profile, SHOWN_TOKENS),
        archive_bytes(shape, profile, TOKENS_PER_HOUR),
        largest,
    )


def _weight_layout(shape: ModelShape, profile: Profile) -> _WeightLayout:
    return _WeightLayout(
        precision=precision(shape, profile),
        item=4 if unpacked_type(profile) == "float32" else 2,
        block=machine_int4_block_rows(profile),
        uses_native_products=uses_native_products(profile),
    )


def _weight_bytes(stored: StoredWeights, layout: _WeightLayout) -> int:
    return sum(_tensor_bytes(tensor, stored, layout) for tensor in stored.tensors)


def _tensor_bytes(tensor: StoredTensor, stored: StoredWeights, layout: _WeightLayout) -> int:
    native = _native_layout(tensor, layout)
    if native is not None:
        return tensor.count // native.columns * native.row_bytes
    bits = _packed_bits(tensor, stored, layout)
    if bits == 4:  # and two numbers of 16 bits for each 32 weights
        return tensor.count * 5 // 8
    if bits == 8:
        return tensor.count + 2 * prod(tensor.shape[:-1])
    return tensor.count * layout.item


def _native_layout(tensor: StoredTensor, layout: _WeightLayout) -> BlockLayout | None:
    """How the library in C++ keeps a matrix of a GGUF file; None if it doesn't keep its bits."""
    is_packed = layout.precision == "packed" and layout.uses_native_products
    found = BLOCK_LAYOUTS.get(tensor.type)
    if not is_packed or found is None or len(tensor.shape) < 2:
        return None
    return found if found.fits(*tensor.shape[-2:]) else None


def _packed_bits(tensor: StoredTensor, stored: StoredWeights, layout: _WeightLayout) -> int | None:
    """Bits per weight, 4 or 8, as gguf.model and packing choose them; None if it is not packed."""
    if layout.precision == "packed":
        if len(tensor.shape) < 2 or BLOCKS.get(tensor.type, (0, 1))[1] == 1:
            return None
        wants_four = tensor.type in FOUR_BIT and not (tensor.is_table or tensor.is_head)
    elif layout.precision in ("int8", "int4"):
        if not tensor.is_matrix and not (stored.is_tied and tensor.is_embedding):
            return None
        wants_four = layout.precision == "int4" and tensor.is_matrix and not tensor.is_head
    else:
        return None
    rows, columns = tensor.shape[-2:]
    if ".ffn_gate_up_exps." in tensor.name:  # becomes two layers
        rows //= 2
    fits = layout.block > 0 and rows % layout.block == 0 and columns % 32 == 0
    return 4 if wants_four and fits else 8


def _bytes_while_loading(stored: StoredWeights, layout: _WeightLayout) -> int:
    """The most bytes that weights take during loading, without the mapped pages of the file."""
    largest = max((tensor.count for tensor in stored.tensors), default=0)
    weights = _weight_bytes(stored, layout)
    if layout.precision == "packed":
        # bytes per weight while a matrix is packed; measured
        factors = {4: 11, 8: 3, None: 4}
        others = [t for t in stored.tensors if not _native_layout(t, layout)]
        taken = (factors[_packed_bits(t, stored, layout)] * t.count_at_once for t in others)
        return weights + max(largest, *taken, 0)  # joined layers are there twice for a while
    if layout.precision in ("int8", "int4"):  # all are unpacked, then packed one by one
        return layout.item * stored.count + 10 * largest
    return weights + (4 * largest if stored.is_gguf else 0)
