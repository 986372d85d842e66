"""How much memory a model takes, and the largest budget that fits, from its files alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.gguf.header import BLOCK_LAYOUTS, BLOCKS, FOUR_BIT, NATIVE_ROW_BLOCK
from sirchat.models.listing import FoundModel
from sirchat.models.shape import (
    ModelShape,
    StoredTensor,
    StoredWeights,
    archive_bytes,
    cache_bytes,
    compiler,
    precision,
    stored_weights,
    unpacked_type,
    uses_cpu,
)

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
    if found.shape is None or found.path is None:
        raise ModelError(f"model {found.name!r} {found.problem or 'has no files'}")
    stored, shape = stored_weights(found.path), found.shape
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
    kind, limit = precision(shape, profile), shape.context_length
    item = 4 if unpacked_type(profile) == "float32" else 2  # bytes of a weight that is not packed
    has_library = profile.compile != "off" and bool(compiler())
    block_rows = (NATIVE_ROW_BLOCK if has_library else 0) if uses_cpu(profile) else 1
    sizes = (tensor_bytes(one, stored.is_tied, kind, item, block_rows) for one in stored.tensors)
    weights = sum(sizes)
    loading, row = weights, cache_bytes(shape, profile, 1)
    if kind in ("int8", "int4"):  # all are unpacked, then packed one by one
        loading = item * stored.count
    elif stored.is_gguf:  # while one is unpacked, or joined with others; the library does neither
        others = (
            prod(one.shape[-2:])
            for one in stored.tensors
            if block_rows != NATIVE_ROW_BLOCK or not _keeps_blocks(one, kind, block_rows)
        )
        loading += 4 * max(others, default=0)
    largest = None
    if free is not None and row and uses_cpu(profile):
        rows = (free - PROGRAM_BYTES - weights) // row
        fits = rows > 0 and PROGRAM_BYTES + loading <= free
        largest = min(rows, limit or rows) if fits else 0
    return MemoryNeed(
        setting,
        kind,
        weights,
        loading,
        cache_bytes(shape, profile, SHOWN_TOKENS),
        archive_bytes(shape, profile, TOKENS_PER_HOUR),
        largest,
    )


def tensor_bytes(tensor: StoredTensor, is_tied: bool, kind: str, item: int, block_rows: int) -> int:
    """The bytes that a tensor takes in memory; `item`: those of a weight that is not packed.

    Matrices of a multiple of `block_rows` rows can keep a file's blocks; 0: none can.
    """
    if _keeps_blocks(tensor, kind, block_rows):
        layout = BLOCK_LAYOUTS[tensor.type]
        return tensor.count // layout.columns * layout.row_bytes
    is_matrix = tensor.is_matrix
    may_be_four = kind == "int4" and is_matrix
    if kind == "packed":
        is_matrix = len(tensor.shape) > 1 and BLOCKS.get(tensor.type, (0, 1))[1] > 1
        may_be_four = tensor.type in FOUR_BIT and not tensor.is_embedding
    elif kind in ("int8", "int4"):
        is_matrix |= is_tied and tensor.is_embedding
    else:
        is_matrix = False
    if not is_matrix:
        return tensor.count * item
    if may_be_four and not tensor.is_head:  # and two numbers of 16 bits for each 32 weights
        return tensor.count * 5 // 8
    return tensor.count + 2 * prod(tensor.shape[:-1])


def _keeps_blocks(tensor: StoredTensor, kind: str, block_rows: int) -> bool:
    is_block_matrix = len(tensor.shape) > 1 and tensor.type in BLOCK_LAYOUTS
    may_keep = kind == "packed" and is_block_matrix and block_rows > 0
    return may_keep and tensor.shape[-2] % block_rows == 0
