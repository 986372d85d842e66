"""The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A file is not trusted: every length is checked against its size before memory is allocated for it.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sirchat.errors import ModelError, format_value
from sirchat.models.file_checks import TensorSpan, refuse_other_kind, refuse_trailing_zeros
from sirchat.models.names import part_paths

_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}  # struct's codes
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_UNKNOWN_END = -1  # where a tensor of an unknown type ends
_NUMBER_LIMIT, _FRACTION_LIMIT = 1 << 32, 1e12  # settings of this size or more count as invalid
# Parts of the names of settings that may be fractions.
_FRACTION_KEYS = ("epsilon", "freq_base", "softcapping", "scale", "factor", "beta", "multiplier")

# For each known tensor type: its number in a file, the weights per block, the bytes per block.
BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
}

_UNREADABLE_TYPES = {40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}  # names of later types, for messages

IMAGE_LAYERS = "vision.block_count"  # the setting of a file with text and image parts in one

# The types of tensors whose matrices sirchat can keep in four bits.
FOUR_BIT = ("Q4_0", "Q4_1", "Q4_K")

NATIVE_ROW_BLOCK = 16  # rows that `products.cpp` multiplies at the same time


class BlockLayout(NamedTuple):
    """How `weights.cpp` lays out a block format of GGUF files, for 16 rows together."""

    columns: int  # of a block
    row_bytes: int  # of a row's block; the file's own, and up to 4 more
    bits: int

    def fits(self, rows: int, columns: int) -> bool:
        return rows > 0 and rows % NATIVE_ROW_BLOCK == 0 and columns % self.columns == 0


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(32, 18, 4),
    "Q4_1": BlockLayout(32, 20, 4),
    "Q5_0": BlockLayout(32, 22, 5),
    "Q5_1": BlockLayout(32, 24, 5),
    "Q8_0": BlockLayout(32, 34, 8),
    "Q4_K": BlockLayout(256, 148, 4),
    "Q5_K": BlockLayout(256, 180, 5),
    "Q6_K": BlockLayout(256, 210, 6),
}

_FORMATS = {number: (name, weights, size) for name, (number, weights, size) in BLOCKS.items()}


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor as a GGUF file stores it: in blocks of few bits, or as plain floats."""

    shape: tuple[int, ...]  # in torch's order: the last dimension changes fastest
    type: str  # a key of `BLOCKS`, or text such as `type 19` for an unknown type
    data: NDArray[np.uint8]  # [n] bytes, a view of the mapped file; empty for an unknown type

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The tensor's bytes, [number of blocks, bytes of a block]."""
        return self.data.reshape(-1, BLOCKS[self.type][2])

    def split_rows(self, max_rows: int) -> Iterator[GgufTensor]:
        by_row = self.data.reshape(self.shape[0], -1)
        for start in range(0, self.shape[0], max_rows):
            part = by_row[start : start + max_rows]
            yield GgufTensor((len(part), *self.shape[1:]), self.type, part.reshape(-1))


@dataclass(frozen=True, eq=False)
class GgufFile:
    """The metadata and the tensors, in the file's order, of a GGUF file or of all its parts.

    If the tensors are views of files mapped into memory, `mapped` has these files.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    mapped: tuple[mmap.mmap, ...] = ()

    @property
    def architecture(self) -> str:
        """The name of the model's architecture, such as `llama`."""
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The metadata of the model itself, with the architecture's name cut from the keys."""
        prefix = f"{self.architecture}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }

    @cached_property
    def largest_dimension(self) -> int:
        """The largest size that a tensor has in any dimension."""
        return max((max(tensor.shape, default=0) for tensor in self.tensors.values()), default=0)

    def number(self, key: str, *, may_be_zero: bool = False) -> int | float:
        """A positive number in the settings, whole if it is a size; raises ModelError otherwise."""
        value: Any = self.settings.get(key)
        is_whole = not any(part in key for part in _FRACTION_KEYS)
        is_number = type(value) is int or (type(value) is float and not is_whole)
        limit = _NUMBER_LIMIT if is_whole else 1 if key.endswith("epsilon") else _FRACTION_LIMIT
        is_usable = is_number and (0 < value < limit or (may_be_zero and value == 0))
        kind = "a whole number" if is_whole else "a number"
        self.require(is_usable, key, f"{kind} above 0, below {limit:,}")
        return int(value) if is_whole else float(value)

    def require(self, is_usable: bool, key: str, allowed: str = "") -> None:
        """Raise ModelError, which names the setting `key`, if it is missing or not usable."""
        if is_usable:
            return
        name = f"{self.architecture}.{key}"
        if key not in self.settings:
            raise ModelError(f"the GGUF file has no {name}")
        value = format_value(self.settings[key])
        raise ModelError(
            f"the GGUF file's {name} is {value}, which can't be used here",
            hint=f"it must be {allowed}" if allowed else "",
        )

    def release_pages(self) -> None:
        """Give back the memory of the file's pages that were read; they can be read again."""
        if sys.platform != "win32" and hasattr(mmap, "MADV_DONTNEED"):
            for part in self.mapped:
                part.madvise(mmap.MADV_DONTNEED)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, 0 or more, of a sensible size."""
    return type(value) is int and 0 <= value < _NUMBER_LIMIT


def parse_gguf(path: Path, *, with_text_lists: bool = True) -> GgufFile:
    """Map a GGUF file into memory, with all parts of a split file, and read the header.

    Tensors for images are left out; without `with_text_lists`, so is the vocabulary, which takes
    most of the time. Raises ModelError if the file is invalid, or if a part is missing.
    """
    file = _parse_part(path, with_text_lists)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return _without_media(file)
    paths = part_paths(path)
    if missing := [part.name for part in paths if not part.is_file()]:
        raise ModelError(f"{path} is one of {count} parts; missing: {', '.join(missing)}")
    parts = [file if part == path else _parse_part(part, with_text_lists) for part in paths]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    numbers = [(part.metadata.get("split.no"), part.metadata.get("split.count")) for part in parts]
    total = file.metadata.get("split.tensors.count", len(tensors))
    if numbers != [(index, len(paths)) for index in range(len(paths))] or len(tensors) != total:
        raise ModelError(
            f"{path} is one of {count} parts, but not of those files: {len(tensors)} of {total} "
            "tensors are there",
            hint="the parts must be named NAME-00001-of-00003.gguf, and so on",
        )
    mapped = tuple(mapping for part in parts for mapping in part.mapped)
    return _without_media(GgufFile(parts[0].metadata, tensors, mapped))


def _without_media(file: GgufFile) -> GgufFile:
    """The file without the tensors for images, and without those for sound beside them."""
    prefixes = ("v.", "mm.", "a.") if IMAGE_LAYERS in file.settings else ()
    named = file.tensors.items()
    return replace(file, tensors={name: x for name, x in named if not name.startswith(prefixes)})


def _parse_part(path: Path, with_text_lists: bool) -> GgufFile:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: empty
        raise ModelError(f"{path} can't be read: {error}") from error
    reader = _Reader(path, mapped, with_text_lists)
    try:
        return reader.read_file()
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise reader.error(str(error)) from error


class _TensorEntry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: int  # a number of `BLOCKS`
    offset: int  # bytes from the beginning of all tensors


class _Reader:
    def __init__(self, path: Path, mapped: mmap.mmap, with_text_lists: bool) -> None:
        self._path, self._mapped, self._offset = path, mapped, 0
        self._size = len(mapped)
        self._with_text_lists = with_text_lists

    def error(self, why: str) -> ModelError:
        return ModelError(
            f"{self._path} is not a valid GGUF file: {why}",
            hint="the file may be incomplete: compare its size with that of the original",
        )

    def read_file(self) -> GgufFile:
        if self._mapped[:4] != b"GGUF":
            refuse_other_kind(self._path, self._mapped[:64])
            raise self.error("it does not begin with GGUF")
        self._offset = 4
        version = self._read_scalar("I")
        if version not in (2, 3):
            is_swapped = version in (2 << 24, 3 << 24)
            raise self.error(
                "it was written for big-endian machines"
                if is_swapped
                else f"its version is {version}, but must be 2 or 3"
            )
        tensor_count, pairs = self._read_count(24), self._read_count(13)
        metadata = {}
        for _ in range(pairs):
            key = self._read_string()
            if key in metadata:
                raise self.error(f"it has {key} twice")
            metadata[key] = self._read_value(self._read_scalar("I"))
        entries = [self._read_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not is_count(alignment) or alignment.bit_count() != 1 or alignment > 1 << 16:
            raise self.error(f"alignment {alignment}")
        start = -(-self._offset // alignment) * alignment
        return GgufFile(metadata, self._locate_tensors(entries, start, alignment), (self._mapped,))

    def _locate_tensors(
        self, entries: list[_TensorEntry], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        data, end = np.frombuffer(self._mapped, np.uint8), 0
        tensors, places = dict[str, GgufTensor](), list[TensorSpan]()
        for entry in entries:
            tensor = tensors[entry.name] = self._locate_tensor(data, start, entry)
            size = tensor.data.nbytes
            places.append(TensorSpan(entry.shape, tensor.type, start + entry.offset, size))
            if end not in (entry.offset, _UNKNOWN_END):
                raise self.error(f"its tensor {entry.name} does not follow the one before it")
            is_known = tensor.type in BLOCKS and end != _UNKNOWN_END
            end = end + -(-size // alignment) * alignment if is_known else _UNKNOWN_END
        if len(tensors) < len(entries):
            raise self.error("it has two tensors of the same name")
        refuse_trailing_zeros(self._path, self._mapped, places)
        return tensors

    def _read_scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self._mapped, self._offset)
        self._offset += struct.calcsize("<" + kind)
        return value

    def _read_count(self, min_bytes: int) -> int:
        """Read the number of entries that follow, of at least `min_bytes` bytes each."""
        count = int(self._read_scalar("Q"))
        if count * min_bytes > self._size - self._offset:
            raise self.error(f"it ends before {count:,} entries")
        return count

    def _read_string(self) -> str:
        length = self._read_count(1)
        start, self._offset = self._offset, self._offset + length
        return self._mapped[start : self._offset].decode("utf-8")

    def _read_value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._read_scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            return self._read_array(self._read_scalar("I"))
        raise self.error(f"it has metadata of the unknown type {kind}")

    def _read_array(self, kind: int) -> list[Any]:
        if kind == _STRING and self._with_text_lists:
            return self._read_strings(self._read_count(8))
        if kind == _STRING:
            self._skip_strings(self._read_count(8))
            return []
        if kind not in _SCALARS:  # arrays of arrays are used by no model
            raise self.error(f"it has an array of the unknown type {kind}")
        size = struct.calcsize("<" + _SCALARS[kind])
        count = self._read_count(size)
        values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._mapped, self._offset)
        self._offset += count * size
        return list(values)

    def _read_strings(self, count: int) -> list[str]:
        # One loop, because calls of `_read_string` would take three times as long.
        offset, data, texts = self._offset, self._mapped, list[str]()
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = offset + 8
            offset = start + read_length(data, offset)[0]
            if offset > self._size:
                raise self.error(f"it ends before the end of {count:,} texts")
            texts.append(data[start:offset].decode("utf-8"))
        self._offset = offset
        return texts

    def _skip_strings(self, count: int) -> None:
        offset, read_length = self._offset, struct.Struct("<Q").unpack_from
        for _ in range(count):  # a length beyond the end of the file fails at the next read
            offset += 8 + read_length(self._mapped, offset)[0]
        self._offset = offset

    def _read_entry(self) -> _TensorEntry:
        name, dimensions = self._read_string(), self._read_scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.error(f"tensor {name} has more than {_MAX_DIMENSIONS} dimensions")
        shape = tuple(int(self._read_scalar("Q")) for _ in range(dimensions))[::-1]
        return _TensorEntry(name, shape, self._read_scalar("I"), self._read_scalar("Q"))

    def _locate_tensor(
        self, data: NDArray[np.uint8], start: int, entry: _TensorEntry
    ) -> GgufTensor:
        shape = entry.shape
        if entry.type not in _FORMATS:
            name = _UNREADABLE_TYPES.get(entry.type, f"type {entry.type}")
            return GgufTensor(shape, name, data[:0])
        kind, weights, size = _FORMATS[entry.type]
        if not shape or shape[-1] % weights:
            raise self.error(f"{kind} blocks do not fit the shape {shape}")
        begin, length = start + entry.offset, prod(shape) // weights * size
        if begin + length > self._size:
            raise self.error(f"it has {self._size:,} bytes, fewer than its tensors need")
        return GgufTensor(shape, kind, data[begin : begin + length])
