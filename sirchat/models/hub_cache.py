"""The Hugging Face cache on disk, read without the hub's library.

models--OWNER--NAME/ refs/main          the commit that `main` was
                     snapshots/COMMIT/  links to files in blobs/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = re.compile(r"models--([\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{4,64}")
_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/((?:[\w.-]+/)*[\w.-]+\.gguf)", re.ASCII | re.IGNORECASE)


def cache_folder() -> Path:
    """Where the hub's library keeps what it downloads."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(os.path.expandvars(given)))
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expanduser(os.path.expandvars(home))) / "hub"
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(parent)) / "huggingface" / "hub"


def cached_models() -> Iterator[tuple[str, Path]]:
    """Hub names of the models in the cache, each with its folder, by name."""
    found = []
    with suppress(OSError):
        found = sorted(cache_folder().iterdir())
    for folder in found:
        matched = _FOLDER.fullmatch(folder.name)
        if matched and folder.is_dir():
            yield matched[1].replace("--", "/"), folder


def snapshot_of(folder: Path) -> Path | None:
    """The files of a cached model's main branch, or else its newest ones; None without any."""
    snapshots = folder / "snapshots"
    with suppress(OSError, ValueError):
        commit = (folder / "refs" / "main").read_text("ascii").strip()
        if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
            return snapshots / commit
    with suppress(OSError):
        there = [one for one in snapshots.iterdir() if one.is_dir()]
        return max(there, key=lambda one: one.stat().st_mtime, default=None)
    return None


def split_gguf_name(name: str) -> tuple[str, str] | None:
    """The model and the file of a name such as `OWNER/NAME/FILE.gguf`; None for another name."""
    matched = _GGUF.fullmatch(name)
    if matched is None or {".", ".."} & set(name.split("/")):
        return None
    return matched[1], matched[2]


def cached_gguf(name: str) -> Path | None:
    """The cached file that a name such as `OWNER/NAME/FILE.gguf` means; None if it is not here."""
    if (parts := split_gguf_name(name)) is None:
        return None
    repository, file = parts
    snapshot = snapshot_of(cache_folder() / f"models--{repository.replace('/', '--')}")
    found = snapshot / file if snapshot is not None else None
    return found if found is not None and found.is_file() else None
