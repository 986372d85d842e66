"""The folder of prepared files: what loading a GGUF file made, which later starts only map.

Each is a safetensors file of bytes. Its folder is limited in size; the longest unused goes first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sirchat.models.names import part_names
from sirchat.paths import prepared_dir, private_dir
from sirchat.version import __version__

MIN_GGUF_BYTES = 1 << 25  # bytes; a smaller GGUF file loads about as fast as it is mapped
ALIGNMENT = 4096  # bytes, of the parts of a file
_FORMAT = 2  # of the files; others are not found
_MOST = 20 * 10**9  # bytes in the folder, and no more than this part of the free disk:
_SHARE = 4
_START, _SAMPLES, _SAMPLE = 1 << 22, 64, 4096  # bytes at a model's start, places, bytes at each
_END, UNFINISHED_SUFFIX = ".safetensors", ".unfinished"
_LEFT_AFTER = 60  # seconds without a write, after which the writer of a file has ended
_BYTES_OF_LENGTH = 8  # with which a safetensors file begins
_MOST_HEADER = 1 << 16  # bytes


class PreparedFile(NamedTuple):
    """A prepared file: where it is, of which model, its bytes, and when it was last used."""

    path: Path
    model: str
    size: int
    used: float  # seconds since 1970


class Header(NamedTuple):
    """What the header of a prepared file says: its model, and bytes and checksum of its parts."""

    model: str
    manifest: int
    weights: int
    checksum: str

    def written(self) -> bytes:
        """The bytes of the header, the same for the same values, of a multiple of `ALIGNMENT`."""
        start, end = self.manifest, self.manifest + self.weights
        said = {
            "__metadata__": {"model": self.model, "checksum": self.checksum},
            "manifest": {"dtype": "U8", "shape": [start], "data_offsets": [0, start]},
            "weights": {"dtype": "U8", "shape": [self.weights], "data_offsets": [start, end]},
        }
        text = json.dumps(said).encode()
        size = -(-(len(text) + _BYTES_OF_LENGTH) // ALIGNMENT) * ALIGNMENT - _BYTES_OF_LENGTH
        return size.to_bytes(_BYTES_OF_LENGTH, "little") + text.ljust(size)


def read_header(path: Path) -> Header:
    """Read the header of a prepared file; ValueError or OSError if it is none, or not whole."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_BYTES_OF_LENGTH), "little")
        text = file.read(min(size, _MOST_HEADER))
        length = os.fstat(file.fileno()).st_size
    try:
        said = json.loads(text)
        about = said["__metadata__"]
        first, second = (int(said[name]["shape"][0]) for name in ("manifest", "weights"))
        header = Header(str(about["model"]), first, second, str(about["checksum"]))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} has no header") from error
    written = header.written()
    if written[_BYTES_OF_LENGTH:] != text or length != len(written) + first + second:
        raise ValueError(f"{path.name} is not as long as its header says")
    return header


def prepared_path(model: Path, how: tuple[str, ...]) -> Path | None:
    """Where the prepared file of a GGUF file is or would be, if it is loaded in the way `how`.

    None for a file that is too small, or can't be read. Any change of the file changes the path.
    """
    digest, size = hashlib.sha256(), 0
    try:
        model = model.resolve()
        for name in part_names(model.name):
            with model.with_name(name).open("rb") as file:
                about = os.fstat(file.fileno())
                times = about.st_mtime_ns, about.st_ctime_ns
                digest.update(repr((about.st_size, about.st_ino, *times)).encode())
                digest.update(file.read(_START))
                for at in range(_SAMPLES):  # times can be set back, and files overwritten
                    file.seek((about.st_size - _SAMPLE) * at // (_SAMPLES - 1) if at else 0)
                    digest.update(file.read(_SAMPLE))
                size += about.st_size
    except (OSError, ValueError):
        return None
    way = hashlib.sha256(repr((_FORMAT, __version__, *how)).encode()).hexdigest()[:16]
    name = f"{_name_of(model)}-{digest.hexdigest()[:24]}-{way}{_END}"
    return prepared_dir() / name if size >= MIN_GGUF_BYTES else None


def make_room(path: Path, size: int) -> bool:
    """Make room for a file of `size` bytes at `path`; False if it would be too large."""
    folder, begun = private_dir(path.parent), time.time()
    for left in folder.glob(f"*{UNFINISHED_SUFFIX}"):
        if begun - left.stat().st_mtime > _LEFT_AFTER:
            left.unlink(missing_ok=True)
    former = path.name.rpartition("-")[0]
    for old in folder.glob(f"{former.partition('-')[0]}-*{_END}"):
        if not old.name.startswith(former):  # of the same model, as it was before
            old.unlink(missing_ok=True)
    kept = sorted(folder.glob(f"*{_END}"), key=lambda file: file.stat().st_mtime)
    sizes = {file: file.stat().st_size for file in kept}
    total = sum(sizes.values())
    most = min(_MOST, (shutil.disk_usage(folder).free + total) // _SHARE)
    while total + size > most and kept and size <= most:
        oldest = kept.pop(0)
        oldest.unlink(missing_ok=True)
        total -= sizes[oldest]
    return total + size <= most


def prepared_files() -> list[PreparedFile]:
    """The prepared files, the one last used first; `model` is empty for one that is damaged."""
    found = list[PreparedFile]()
    for path in prepared_dir().glob(f"*{_END}"):
        with suppress(OSError):
            about, model = path.stat(), ""
            with suppress(ValueError):
                model = read_header(path).model
            found.append(PreparedFile(path, model, about.st_size, about.st_mtime))
    return sorted(found, key=lambda file: -file.used)


def _name_of(model: Path) -> str:
    return hashlib.sha256(os.fsencode(model)).hexdigest()[:16]
