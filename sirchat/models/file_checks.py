"""Says what is wrong with a weight file that is incomplete, or not what its name says.

Only headers and a few other bytes are read. Files are not trusted.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

from sirchat.errors import ModelError

LENGTH_BYTES = 8  # with which a safetensors file begins
_MAX_HEADER_BYTES = 10**8  # bytes, as in the library safetensors
_CHUNK_BYTES = 1 << 16
_INCOMPLETE = "the download is incomplete; fetch the file again"
# What a file begins with that is of another kind.
_OTHER_KINDS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it: git lfs pull",
    b"<": "a web page; download the file itself",
    b"PK\3\4": "a pickle or a zip archive; weights must be safetensors or GGUF",
    b"\x80": "a pickle; weights must be safetensors or GGUF",
    b"GGUF": "a GGUF file; its name must end with .gguf",
    b"tjgg": "a file of the time before GGUF; convert the model again",
    bytes(64): f"nothing but zeros at its beginning; {_INCOMPLETE}",
}


class TensorSpan(NamedTuple):
    """The shape, the number type and the place of a tensor in a file."""

    shape: tuple[int, ...]
    type: str  # such as `BF16`
    start: int  # bytes from the beginning of the file
    size: int  # bytes


def refuse_other_kind(path: Path, beginning: bytes) -> None:
    """Raise ModelError if the first bytes of a file are those of another kind of file."""
    if beginning[LENGTH_BYTES:].startswith(b"{"):
        raise ModelError(f"{path} is a safetensors file", hint="give the folder that contains it")
    for start, kind in _OTHER_KINDS.items():
        if beginning.startswith(start):
            what, _, hint = kind.partition("; ")
            raise ModelError(f"{path} is {what}", hint=hint)


def refuse_trailing_zeros(path: Path, data: mmap.mmap, tensors: Iterable[TensorSpan]) -> None:
    """Raise ModelError if the last 16th of the last matrix, and all after it, is zeros."""
    last = max(
        (one for one in tensors if len(one.shape) > 1), key=lambda one: one.start, default=None
    )
    if last is None or not last.size:
        return
    # Padding, such as rows of tokens that do not exist, may be zeros.
    for at in range(last.start + last.size * 15 // 16, len(data), _CHUNK_BYTES):
        if data[at : at + _CHUNK_BYTES].strip(b"\0"):
            return
    raise ModelError(f"{path} has only zeros at its end", hint=_INCOMPLETE)


def read_tensor_spans(path: Path) -> dict[str, TensorSpan]:
    """Read from a safetensors file's header where each tensor lies, by the tensor's name.

    Raises ModelError, which says what is wrong with the file.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: empty
        raise ModelError(f"{path} can't be read: {error}") from error
    if data[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        refuse_other_kind(path, data[:64])
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    try:
        header = json.loads(data[LENGTH_BYTES : min(start, _MAX_HEADER_BYTES)])
        header.pop("__metadata__", None)
        found = dict[str, TensorSpan]()
        for name, about in header.items():
            (begin, end), shape = about["data_offsets"], tuple(about["shape"])
            are_counts = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
            if not are_counts or prod(shape) > 8 * (end - begin):  # a number has a bit or more
                raise ValueError(name)
            found[name] = TensorSpan(shape, str(about["dtype"]), start + begin, end - begin)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        why = f"{path} can't be read: it is no safetensors file, or incomplete"
        raise ModelError(why) from error
    needed = max((one.start + one.size for one in found.values()), default=start)
    if needed > len(data):
        raise ModelError(
            f"{path} can't be read: it has {len(data):,} bytes, by its header {needed:,}",
            hint=_INCOMPLETE,
        )
    refuse_trailing_zeros(path, data, found.values())
    return found
