"""Writes the loaded form of a GGUF file into a prepared file, and makes the model from it again.

Weights are mapped as they were in memory, so that logits are the same to the last bit. Each file is
a safetensors file of bytes. If the folder is too large, the longest unused file is deleted.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirchat.models import packed
from sirchat.models.file_checks import LENGTH_BYTES
from sirchat.models.gguf.model import empty_module, finish_module, set_weight
from sirchat.models.names import part_paths
from sirchat.models.packed import PackedLinear, RowLinear, SharedEmbedding
from sirchat.models.packing import PackedExperts
from sirchat.paths import make_private_dir, open_private, prepared_dir
from sirchat.version import __version__

MIN_GGUF_BYTES = 1 << 25  # bytes; a smaller GGUF file loads about as fast as it is mapped
_ALIGNMENT = 4096  # bytes, of the parts of a file
_FORMAT_VERSION = 4  # of the files; others are not found
_MAX_FOLDER_BYTES = 20 * 10**9  # bytes in the folder, and no more than this part of the free disk:
_DISK_DIVISOR = 4
_HASHED_START = 1 << 22  # bytes; of the rest, so many samples of so many bytes:
_SAMPLE_COUNT, _SAMPLE_BYTES = 64, 4096
_SUFFIX, _UNFINISHED_SUFFIX = ".safetensors", ".unfinished"
_ABANDONED_SECONDS = 60  # seconds without a write, after which the writer of a file has ended
_MAX_HEADER_BYTES = 1 << 16  # bytes

_WORDS_PER_SUM = 64  # words of eight bytes that are summed for the checksum
_WORDS_AT_ONCE = 1 << 23  # that are summed at a time
_BYTES_PER_WRITE = 1 << 24  # bytes that are written at a time
_END_SECONDS = 2.0  # for which the end of the process waits until the file is whole
_PIECE_SECONDS = 5.0  # seconds within which a piece is written, or the disk hangs
WRITER_THREAD = "writer of a prepared file"  # name of a thread


class Header(NamedTuple):
    model: str
    manifest_bytes: int
    weights_bytes: int
    checksum: str

    def encode(self) -> bytes:
        """The header's bytes, padded to a multiple of `_ALIGNMENT`."""
        start, end = self.manifest_bytes, self.manifest_bytes + self.weights_bytes
        values = {
            "__metadata__": {"model": self.model, "checksum": self.checksum},
            "manifest": {"dtype": "U8", "shape": [start], "data_offsets": [0, start]},
            "weights": {"dtype": "U8", "shape": [self.weights_bytes], "data_offsets": [start, end]},
        }
        text = json.dumps(values).encode()
        size = -(-(len(text) + LENGTH_BYTES) // _ALIGNMENT) * _ALIGNMENT - LENGTH_BYTES
        return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)


def read_header(path: Path) -> Header:
    """Read a prepared file's header; raises ValueError or OSError if it is missing or damaged."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(min(size, _MAX_HEADER_BYTES))
        length = os.fstat(file.fileno()).st_size
    try:
        values = json.loads(text)
        metadata = values["__metadata__"]
        manifest, weights = (int(values[name]["shape"][0]) for name in ("manifest", "weights"))
        header = Header(str(metadata["model"]), manifest, weights, str(metadata["checksum"]))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} has no header") from error
    encoded = header.encode()
    if encoded[LENGTH_BYTES:] != text or length != len(encoded) + manifest + weights:
        raise ValueError(f"{path.name} is not as long as its header says")
    return header


def prepared_path(model: Path, variant: tuple[str, ...]) -> Path | None:
    """The path of a GGUF file's prepared file, which may not exist; None if small or unreadable.

    Any change of the GGUF file changes the path; so do other loading settings (`variant`).
    """
    digest, size = hashlib.sha256(), 0
    try:
        for part in part_paths(model):  # in the hub's cache, links to files of other names
            with part.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
                digest.update(repr(identity).encode())
                digest.update(file.read(_HASHED_START))
                last = max(0, stat.st_size - _SAMPLE_BYTES)
                for index in range(_SAMPLE_COUNT):  # times can be set back, files overwritten
                    file.seek(last * index // (_SAMPLE_COUNT - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
                size += stat.st_size
    except (OSError, ValueError):
        return None
    settings = repr((_FORMAT_VERSION, __version__, *variant)).encode()
    settings_hash = hashlib.sha256(settings).hexdigest()[:16]
    path_hash = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]
    name = f"{path_hash}-{digest.hexdigest()[:24]}-{settings_hash}{_SUFFIX}"
    return prepared_dir() / name if size >= MIN_GGUF_BYTES else None


def _make_room(path: Path, size: int) -> bool:
    """Delete old files for one of `size` bytes at `path`; False if that would be too large."""
    folder, now = make_private_dir(path.parent), time.time()
    for unfinished in folder.glob(f"*{_UNFINISHED_SUFFIX}"):
        if now - unfinished.stat().st_mtime > _ABANDONED_SECONDS:
            unfinished.unlink(missing_ok=True)
    path_hash, content_hash, _ = path.name.split("-")
    for file in folder.glob(f"{path_hash}-*{_SUFFIX}"):
        if not file.name.startswith(f"{path_hash}-{content_hash}"):  # the model was changed
            file.unlink(missing_ok=True)
    by_age = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime)
    sizes = {file: file.stat().st_size for file in by_age}
    total = sum(sizes.values())
    limit = min(_MAX_FOLDER_BYTES, (shutil.disk_usage(folder).free + total) // _DISK_DIVISOR)
    while total + size > limit and by_age and size <= limit:
        oldest = by_age.pop(0)
        oldest.unlink(missing_ok=True)
        total -= sizes[oldest]
    return total + size <= limit


def map_prepared(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Map a prepared file; returns its module, and the metadata for the tokenizer.

    Any exception means that the file is damaged.
    """
    header = read_header(path)
    start = len(header.encode())
    weights_start = start + header.manifest_bytes
    end = weights_start + header.weights_bytes
    file_bytes = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
    if _checksum(path, [file_bytes[start:]]) != header.checksum:
        raise ValueError(f"{path.name} is damaged")
    with suppress(OSError):
        os.utime(path)  # the longest unused is deleted first
    manifest = json.loads(file_bytes[start:weights_start].numpy().tobytes())
    weights = file_bytes[weights_start:]
    tensors = [
        weights[begin : begin + count].view(getattr(torch, kind)).view(shape)
        for begin, count, kind, shape in manifest["tensors"]
    ]
    return _restore_module(manifest, tensors, dtype), manifest["tokenizer"]


def write_prepared(
    path: Path, model: Path, values: Mapping[str, Any], tokenizer: Mapping[str, Any], module: Any
) -> None:
    """Begin to write a prepared file in a thread, unless the file would be of no use."""
    stored = _StoredModule(module)
    manifest = {"values": values, "tokenizer": tokenizer, **stored.manifest}
    if not stored.manifest["layers"]:
        return
    stopping = Event()
    what = path, str(model), manifest, stored.parts, stopping
    thread = Thread(target=_write, args=what, daemon=True, name=WRITER_THREAD)

    # A daemon that is left to the end of Python can abort it: "terminate called without an active
    # exception".
    def end() -> None:
        thread.join(_END_SECONDS)
        stopping.set()
        thread.join(_PIECE_SECONDS)

    atexit.register(end)
    thread.start()


def _write(
    path: Path, model: str, manifest: Mapping[str, Any], weights: Sequence[Tensor], stopping: Event
) -> None:
    """Write a file, wholly or not at all, unless `stopping` is set before its end."""
    text = json.dumps(manifest).encode()
    if json.loads(text) != manifest:
        return
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8), *weights]
    size = sum(map(len, weights))
    new = path.with_name(f"{secrets.token_hex(4)}{_UNFINISHED_SUFFIX}")
    with suppress(OSError):  # full or read-only: then the next start loads as this one did
        if not _make_room(path, len(text) + size):
            return
        header = Header(model, len(text), size, _checksum(path, parts))
        try:
            with open_private(new, "xb") as file:
                file.write(header.encode())
                for part in (tensor.numpy() for tensor in parts):
                    for start in range(0, len(part), _BYTES_PER_WRITE):
                        if stopping.is_set():
                            raise InterruptedError  # an OSError
                        file.write(part[start : start + _BYTES_PER_WRITE])
            if sys.platform != "win32":  # there it could not be deleted
                new.chmod(0o400)  # what shortens a mapped file ends the chats that use it
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def _checksum(path: Path, parts: Iterable[Tensor]) -> str:
    """A checksum of the file's name and the bytes in `parts`."""
    # The sums are a 64th of the bytes, and made at the speed of the memory; to hash all of the
    # bytes takes ten times as long.
    digest = hashlib.sha256(path.name.encode())
    for part in parts:
        for words in torch.split(part.view(torch.int64), _WORDS_AT_ONCE):
            digest.update(words.view(-1, _WORDS_PER_SUM).sum(1).numpy().tobytes())
    return digest.hexdigest()


class _StoredModule:
    """The tensors of a module, each once, and a description to make the module from them.

    `parts` has the tensors' bytes, each padded to whole sums of `_checksum`; `manifest` is JSON.
    """

    def __init__(self, module: Any) -> None:
        self.parts, self._size = list[Tensor](), 0
        self._places, self._joined = list[tuple[int, int, str, list[int]]](), list[Any]()
        self._numbers, self._joins = dict[Any, int](), dict[int, int]()
        self._flat = list[Tensor]()  # so that no address is used twice
        plain, layers, experts = module.state_dict(keep_vars=True), list[dict[str, Any]](), {}
        for path, layer in module.named_modules():
            if isinstance(layer, PackedExperts):
                experts[path] = {part: len(getattr(layer, part)) for part in ("gate", "up", "down")}
            elif isinstance(layer, SharedEmbedding):
                layers.append({"path": path, "is_embedding": True, **self._layer(layer.head)})
            elif isinstance(layer, PackedLinear):
                layers.append({"path": path, "is_embedding": False, **self._layer(layer)})
                for name in layer.row_dims:
                    plain.pop(f"{path}.{name}")
        self.manifest: dict[str, Any] = {
            "plain": {name: self._number(tensor) for name, tensor in plain.items()},
            "layers": layers,
            "joined": self._joined,
            "experts": experts,
            "tensors": [list(place) for place in self._places],
        }

    def _layer(self, layer: PackedLinear) -> dict[str, Any]:
        kind = type(layer).__name__
        if layer.joined is None:
            tensors = [self._number(getattr(layer, name)) for name in layer.row_dims]
            return {"kind": kind, "tensors": tensors}
        joined_layer, (name, dim) = layer.joined[0], next(iter(layer.row_dims.items()))
        if id(joined_layer) not in self._joins:
            self._joins[id(joined_layer)] = len(self._joined)
            self._joined.append(self._layer(joined_layer))
        first, part = getattr(joined_layer, name), getattr(layer, name)
        start = (part.storage_offset() - first.storage_offset()) // first.stride(dim)
        return {
            "kind": kind,
            "joined": self._joins[id(joined_layer)],
            "rows": [start, layer.out_features],
        }

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor; the bytes of a new tensor are added."""
        flat = tensor.detach().contiguous().view(-1)
        key = (flat.data_ptr(), flat.dtype, tensor.shape)
        if key not in self._numbers or not len(flat):
            self._numbers[key] = len(self._places)
            kind = str(tensor.dtype).removeprefix("torch.")
            self._places.append((self._size, flat.nbytes, kind, list(tensor.shape)))
            self._flat.append(flat)
            bytes_ = flat.view(torch.uint8)
            missing = -len(bytes_) % (8 * _WORDS_PER_SUM)
            if missing:
                bytes_ = torch.cat((bytes_, bytes_.new_zeros(missing)))
            self.parts.append(bytes_)
            self._size += len(bytes_)
        return self._numbers[key]


def _restore_module(manifest: Mapping[str, Any], tensors: list[Tensor], dtype: torch.dtype) -> Any:
    module = empty_module(manifest["values"], dtype)
    for name, number in manifest["plain"].items():
        set_weight(module, name, tensors[number])

    def make_layer(entry: Mapping[str, Any]) -> PackedLinear:
        kind: type[PackedLinear] = getattr(packed, entry["kind"])
        if "joined" not in entry:
            return kind(*(tensors[number] for number in entry["tensors"]))
        joined_layer = joined[entry["joined"]]
        rows = (
            getattr(joined_layer, name).narrow(dim, *entry["rows"])
            for name, dim in kind.row_dims.items()
        )
        layer = kind(*rows)
        layer.joined = (joined_layer,)
        return layer

    joined = list[PackedLinear]()
    joined += [make_layer(entry) for entry in manifest["joined"]]
    layers = {entry["path"]: make_layer(entry) for entry in manifest["layers"]}
    shared = {entry["path"] for entry in manifest["layers"] if entry["is_embedding"]}
    for path in manifest["experts"]:
        of_experts = {
            part: [layers.pop(f"{path}.{part}.{index}") for index in range(count)]
            for part, count in manifest["experts"][path].items()
        }
        module.set_submodule(path, PackedExperts(module.get_submodule(path), of_experts))
    for path, layer in layers.items():
        before = module.get_submodule(path)
        if path in shared and isinstance(layer, RowLinear):
            module.set_submodule(path, SharedEmbedding(before, layer, dtype))
        else:
            layer.bias = before.bias
            module.set_submodule(path, layer)
    return finish_module(module)
