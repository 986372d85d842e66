"""Writes what loading a GGUF file made into a prepared file, and makes the model from it again.

Weights are mapped as they lay in memory, so that logits are the same to the last bit.
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
from sirchat.models.packed import Int8Linear, PackedLinear, SharedEmbedding
from sirchat.models.packing import PackedExperts
from sirchat.models.prepared import ALIGNMENT, UNFINISHED_SUFFIX, Header, make_room, read_header
from sirchat.paths import open_private

_RUN = 64  # words of eight bytes that are summed for the checksum
_WORDS = 1 << 23  # that are summed at a time
_PIECE = 1 << 24  # bytes that are written at a time
_LAST = 5.0  # seconds within which a piece is written, or the disk hangs
WRITER_THREAD = "writer of a prepared file"  # name of a thread


class PreparedModel(NamedTuple):
    """The contents of a prepared file: the module, and the metadata for the tokenizer."""

    module: Any
    tokenizer: dict[str, Any]


def map_prepared(path: Path, dtype: torch.dtype) -> PreparedModel:
    """Map a prepared file and make its module; any exception says that the file is damaged."""
    header = read_header(path)
    size, start = header.manifest + header.weights, len(header.written())
    whole = torch.from_file(str(path), shared=False, size=start + size, dtype=torch.uint8)
    if _checksum(path, [whole[start:]]) != header.checksum:
        raise ValueError(f"{path.name} is damaged")
    with suppress(OSError):
        os.utime(path)  # the longest unused is deleted first
    manifest, weights = whole[start : start + header.manifest], whole[start + header.manifest :]
    said = json.loads(manifest.numpy().tobytes())
    tensors = [
        weights[begin : begin + count].view(getattr(torch, kind)).view(shape)
        for begin, count, kind, shape in said["tensors"]
    ]
    return PreparedModel(_restored(said, tensors, dtype), said["tokenizer"])


def write_prepared(
    path: Path, model: Path, values: Mapping[str, Any], tokenizer: Mapping[str, Any], module: Any
) -> Thread | None:
    """Begin to write a prepared file in a thread; None if it has no use."""
    stored = _Stored(module)
    said = {"values": values, "tokenizer": tokenizer, **stored.said}
    if not stored.said["layers"]:
        return None
    writing = _Writing(path, model, said, stored.parts)
    writer = Thread(target=writing.run, daemon=True, name=WRITER_THREAD)

    # The end of the process waits for no more than a piece. A daemon that is left to the end of
    # Python can abort it: "terminate called without an active exception".
    def end() -> None:
        writing.ends.set()
        writer.join(_LAST)
        if not writer.is_alive():
            writing.go_on_in_background()

    atexit.register(end)
    writer.start()
    return writer


class _Writing:
    """A prepared file that is written in a thread, until `ends`, and perhaps in a process then."""

    def __init__(
        self, path: Path, model: Path, said: Mapping[str, Any], weights: Sequence[Tensor]
    ) -> None:
        self._path, self._model, self._said, self._weights = path, model, said, weights
        self.ends, self._lock = Event(), -1

    def run(self) -> None:
        """Write the file, once no other process writes one, unless that `ends`."""
        while (lock := background.lock()) is None:
            if self.ends.wait(1):
                return
        self._lock = lock
        if self._write():
            os.close(lock)
            self._lock = -1

    def go_on_in_background(self) -> None:
        """Write what was begun in a process that outlives this one, where it can be forked."""
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
                self.ends.clear()
                self._write()
            finally:
                os._exit(0)

    def _write(self) -> bool:
        """Write the file; False if that `ends` too early."""
        path, text = self._path, json.dumps(self._said).encode()
        if json.loads(text) != self._said:
            return True
        text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
        parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8), *self._weights]
        size = sum(map(len, self._weights))
        new = path.with_name(f"{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
        with suppress(OSError):  # full or read-only: then the next start loads as this one did
            if self.ends.is_set():
                return False
            if not make_room(path, len(text) + size):
                return True
            header = Header(str(self._model), len(text), size, _checksum(path, parts))
            try:
                with open_private(new, "xb") as file:
                    file.write(header.written())
                    for part in (one.numpy() for one in parts):
                        for start in range(0, len(part), _PIECE):
                            if self.ends.is_set():
                                raise InterruptedError  # an OSError
                            file.write(part[start : start + _PIECE])
                if sys.platform != "win32":  # there it could not be deleted
                    new.chmod(0o400)  # what shortens a mapped file ends the chats that use it
                os.replace(new, path)
            except OSError as error:
                new.unlink(missing_ok=True)
                return not isinstance(error, InterruptedError)
        return True


def _checksum(path: Path, parts: Iterable[Tensor]) -> str:
    """A checksum of bytes, in parts of whole runs, for the file at this path alone."""
    # The sums are a 64th of the bytes, and made at the speed of the memory; to hash all of the
    # bytes takes ten times as long.
    digest = hashlib.sha256(path.name.encode())
    for part in parts:
        for words in torch.split(part.view(torch.int64), _WORDS):
            digest.update(words.view(-1, _RUN).sum(1).numpy().tobytes())
    return digest.hexdigest()


class _Stored:
    """The tensors of a module, each once, and how to make the module of them.

    `parts` are their bytes, each of whole runs; `said` is for the manifest.
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
                layers.append({"path": path, **self._layer(layer.head, SharedEmbedding)})
            elif isinstance(layer, PackedLinear):
                layers.append({"path": path, **self._layer(layer, type(layer))})
                for name in layer.row_dims:
                    plain.pop(f"{path}.{name}")
        self.said: dict[str, Any] = {
            "plain": {name: self._number(tensor) for name, tensor in plain.items()},
            "layers": layers,
            "joined": self._joined,
            "experts": experts,
            "tensors": [list(place) for place in self._places],
        }

    def _layer(self, layer: PackedLinear, kind: type) -> dict[str, Any]:
        if layer.joined is None:
            tensors = [self._number(getattr(layer, name)) for name in layer.row_dims]
            return {"kind": kind.__name__, "tensors": tensors}
        whole, (name, dim) = layer.joined[0], next(iter(layer.row_dims.items()))
        if id(whole) not in self._joins:
            self._joins[id(whole)] = len(self._joined)
            self._joined.append(self._layer(whole, type(whole)))
        first, part = getattr(whole, name), getattr(layer, name)
        start = (part.storage_offset() - first.storage_offset()) // first.stride(dim)
        return {
            "kind": kind.__name__,
            "joined": self._joins[id(whole)],
            "rows": [start, layer.out_features],
        }

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor, whose bytes are added if they are new."""
        flat = tensor.detach().contiguous().view(-1)
        key = (flat.data_ptr(), flat.dtype, tensor.shape)
        if key not in self._numbers or not len(flat):
            self._numbers[key] = len(self._places)
            kind = str(tensor.dtype).removeprefix("torch.")
            self._places.append((self._size, flat.nbytes, kind, list(tensor.shape)))
            self._flat.append(flat)
            bytes_ = flat.view(torch.uint8)
            missing = -len(bytes_) % (8 * _RUN)
            if missing:
                bytes_ = torch.cat((bytes_, bytes_.new_zeros(missing)))
            self.parts.append(bytes_)
            self._size += len(bytes_)
        return self._numbers[key]


def _restored(said: Mapping[str, Any], tensors: list[Tensor], dtype: torch.dtype) -> Any:
    """Make the module that a manifest describes, of its tensors."""
    module = empty_module(said["values"], dtype)
    for name, number in said["plain"].items():
        set_weight(module, name, tensors[number])

    def layer_of(about: Mapping[str, Any]) -> PackedLinear:
        is_shared = about["kind"] == SharedEmbedding.__name__
        kind: type[PackedLinear] = Int8Linear if is_shared else getattr(packed, about["kind"])
        if "joined" not in about:
            return kind(*(tensors[number] for number in about["tensors"]))
        whole = joined[about["joined"]]
        rows = (
            getattr(whole, name).narrow(dim, *about["rows"]) for name, dim in kind.row_dims.items()
        )
        layer = kind(*rows)
        layer.joined = (whole,)
        return layer

    joined = list[PackedLinear]()
    joined += [layer_of(about) for about in said["joined"]]
    layers = {about["path"]: layer_of(about) for about in said["layers"]}
    shared = {about["path"] for about in said["layers"] if about["kind"] == "SharedEmbedding"}
    for path in said["experts"]:
        of_experts = {
            part: [layers.pop(f"{path}.{part}.{at}") for at in range(count)]
            for part, count in said["experts"][path].items()
        }
        module.set_submodule(path, PackedExperts(module.get_submodule(path), of_experts))
    for path, layer in layers.items():
        before = module.get_submodule(path)
        if path in shared and isinstance(layer, Int8Linear):
            module.set_submodule(path, SharedEmbedding(before, layer, dtype))
        else:
            layer.bias = before.bias
            module.set_submodule(path, layer)
    return finish_module(module)
