"""Writes the loaded form of a GGUF file into a prepared file, and makes the model from it again.

Weights are mapped as they were in memory, so that logits are the same to the last bit.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirchat.models import background, packed
from sirchat.models.gguf.model import empty_module, finish_module, set_weight
from sirchat.models.packed import PackedLinear, RowLinear, SharedEmbedding
from sirchat.models.packing import PackedExperts
from sirchat.models.prepared import ALIGNMENT, UNFINISHED_SUFFIX, Header, make_room, read_header
from sirchat.paths import open_private

_WORDS_PER_SUM = 64  # words of eight bytes that are summed for the checksum
_WORDS_AT_ONCE = 1 << 23  # that are summed at a time
_BYTES_PER_WRITE = 1 << 24  # bytes that are written at a time
_JOIN_SECONDS = 5.0  # seconds within which a piece is written, or the disk hangs
WRITER_THREAD = "writer of a prepared file"  # name of a thread


class PreparedModel(NamedTuple):
    """The contents of a prepared file: the module, and the metadata for the tokenizer."""

    module: Any
    tokenizer: dict[str, Any]


def map_prepared(path: Path, dtype: torch.dtype) -> PreparedModel:
    """Map a prepared file and make its module; any exception means that the file is damaged."""
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
    return PreparedModel(_restore_module(manifest, tensors, dtype), manifest["tokenizer"])


def write_prepared(
    path: Path, model: Path, values: Mapping[str, Any], tokenizer: Mapping[str, Any], module: Any
) -> Thread | None:
    """Begin to write a prepared file in a thread; None if the file would be of no use."""
    stored = _StoredModule(module)
    manifest = {"values": values, "tokenizer": tokenizer, **stored.manifest}
    if not stored.manifest["layers"]:
        return None
    writer = _PreparedWriter(path, model, manifest, stored.parts)
    thread = Thread(target=writer.run, daemon=True, name=WRITER_THREAD)

    # The end of the process waits for no more than a piece. A daemon that is left to the end of
    # Python can abort it: "terminate called without an active exception".
    def end() -> None:
        writer.stopping.set()
        thread.join(_JOIN_SECONDS)
        if not thread.is_alive():
            writer.go_on_in_background()

    atexit.register(end)
    thread.start()
    return thread


class _PreparedWriter:
    """Writes a prepared file in a thread until `stopping` is set, then perhaps in a process."""

    def __init__(
        self, path: Path, model: Path, manifest: Mapping[str, Any], weights: Sequence[Tensor]
    ) -> None:
        self._path, self._model, self._manifest, self._weights = path, model, manifest, weights
        self.stopping, self._lock = Event(), -1

    def run(self) -> None:
        while (lock := background.lock()) is None:
            if self.stopping.wait(1):
                return
        self._lock = lock
        if self._write():
            os.close(lock)
            self._lock = -1

    def go_on_in_background(self) -> None:
        """Finish the file in a process that outlives this one, where a fork is possible."""
        if self._lock < 0 or sys.platform != "linux":
            return
        with warnings.catch_warnings(), suppress(OSError):
            warnings.simplefilter("ignore")  # of a fork beside threads, which this needs none of
            if os.fork():
                os.close(self._lock)
                return
            try:
                background.detach_from_parent(self._lock)
                torch.set_num_threads(1)  # the others are not there
                self.stopping.clear()
                self._write()
            finally:
                os._exit(0)

    def _write(self) -> bool:
        """Write the file; returns False if `stopping` was set before the end."""
        path, text = self._path, json.dumps(self._manifest).encode()
        if json.loads(text) != self._manifest:
            return True
        text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
        parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8), *self._weights]
        size = sum(map(len, self._weights))
        new = path.with_name(f"{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
        with suppress(OSError):  # full or read-only: then the next start loads as this one did
            if self.stopping.is_set():
                return False
            if not make_room(path, len(text) + size):
                return True
            header = Header(str(self._model), len(text), size, _checksum(path, parts))
            try:
                with open_private(new, "xb") as file:
                    file.write(header.encode())
                    for part in (tensor.numpy() for tensor in parts):
                        for start in range(0, len(part), _BYTES_PER_WRITE):
                            if self.stopping.is_set():
                                raise InterruptedError  # an OSError
                            file.write(part[start : start + _BYTES_PER_WRITE])
                if sys.platform != "win32":  # there it could not be deleted
                    new.chmod(0o400)  # what shortens a mapped file ends the chats that use it
                os.replace(new, path)
            except OSError as error:
                new.unlink(missing_ok=True)
                return not isinstance(error, InterruptedError)
        return True


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
