"""The folder of prepared files, which hold the loaded form of a GGUF file for later starts to map.

Each is a safetensors file of bytes. If the folder is too large, the longest unused file is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from sirchat.models.names import part_names
from sirchat.paths import make_private_dir, prepared_dir
from sirchat.version import __version__

MIN_GGUF_BYTES = 1 << 25  # bytes; a smaller GGUF file loads about as fast as it is mapped
ALIGNMENT = 4096  # bytes, of the parts of a file
_FORMAT_VERSION = 3  # of the files; others are not found
_MAX_FOLDER_BYTES = 20 * 10**9  # bytes in the folder, and no more than this part of the free disk:
_DISK_DIVISOR = 4
_HASHED_START = 1 << 22  # bytes; of the rest, so many samples of so many bytes:
_SAMPLE_COUNT, _SAMPLE_BYTES = 64, 4096
_SUFFIX, UNFINISHED_SUFFIX = ".safetensors", ".unfinished"
_ABANDONED_SECONDS = 60  # seconds without a write, after which the writer of a file has ended
_LENGTH_BYTES = 8  # with which a safetensors file begins
_MAX_HEADER_BYTES = 1 << 16  # bytes


class Header(NamedTuple):
    model: str
    manifest_bytes: int
    weights_bytes: int
    checksum: str

    def encode(self) -> bytes:
        """The header's bytes, padded to a multiple of `ALIGNMENT`."""
        start, end = self.manifest_bytes, self.manifest_bytes + self.weights_bytes
        values = {
            "__metadata__": {"model": self.model, "checksum": self.checksum},
            "manifest": {"dtype": "U8", "shape": [start], "data_offsets": [0, start]},
            "weights": {"dtype": "U8", "shape": [self.weights_bytes], "data_offsets": [start, end]},
        }
        text = json.dumps(values).encode()
        size = -(-(len(text) + _LENGTH_BYTES) // ALIGNMENT) * ALIGNMENT - _LENGTH_BYTES
        return size.to_bytes(_LENGTH_BYTES, "little") + text.ljust(size)


def read_header(path: Path) -> Header:
    """Read a prepared file's header; raises ValueError or OSError if it is missing or damaged."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
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
    if encoded[_LENGTH_BYTES:] != text or length != len(encoded) + manifest + weights:
        raise ValueError(f"{path.name} is not as long as its header says")
    return header


def prepared_path(model: Path, variant: tuple[str, ...]) -> Path | None:
    """The path of a GGUF file's prepared file, which may not exist; None if small or unreadable.

    Any change of the GGUF file changes the path; so do other loading settings (`variant`).
    """
    digest, size = hashlib.sha256(), 0
    try:
        model = model.resolve()
        for name in part_names(model.name):
            with model.with_name(name).open("rb") as file:
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
    name = f"{_path_hash(model)}-{digest.hexdigest()[:24]}-{settings_hash}{_SUFFIX}"
    return prepared_dir() / name if size >= MIN_GGUF_BYTES else None


def make_room(path: Path, size: int) -> bool:
    """Delete old files for one of `size` bytes at `path`; False if that would be too large."""
    folder, now = make_private_dir(path.parent), time.time()
    for unfinished in folder.glob(f"*{UNFINISHED_SUFFIX}"):
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


def _path_hash(model: Path) -> str:
    return hashlib.sha256(os.fsencode(model)).hexdigest()[:16]
