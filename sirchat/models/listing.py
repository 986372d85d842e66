"""The models that are here: bundled, in a package, in folders, in the Hugging Face cache.

Reads headers and config files only. What can't be read or used is listed with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sirchat import paths
from sirchat.errors import ModelError
from sirchat.models.names import BUNDLED, PACKAGED, cached_models, packaged_gguf, snapshot_of
from sirchat.models.shape import ModelShape, shape_of_folder, shape_of_gguf

Source = Literal["bundled", "package", "folder", "hub"]

_DEPTH = 3  # of folders in a folder of models, such as OWNER/NAME/FILE
_MOST_FOLDERS = 5_000


@dataclass(frozen=True)
class FoundModel:
    """A model, or what should be one.

    Attributes:
        name: what `--model` takes.
        source: where it was found.
        path: its file or folder; None if it is not installed.
        size: bytes on disk.
        shape: what its files say of it; None where they can't be read.
        problem: why it can't be used as it is; empty if it can.
    """

    name: str
    source: Source
    path: Path | None
    size: int = 0
    shape: ModelShape | None = None
    problem: str = ""


def find_models(folders: Iterable[Path] = ()) -> list[FoundModel]:
    """All models that are here; `folders` are searched beside the user's own folder of models."""
    found = [_looked_at(name, "bundled", paths.tiny_dir().parent / name) for name in BUNDLED]
    for name in PACKAGED:
        try:
            found.append(_looked_at(name, "package", packaged_gguf(name)))
        except ModelError as error:
            found.append(FoundModel(name, "package", None, problem=f"not installed: {error.hint}"))
    own = paths.models_dir()
    found += [_looked_at(str(path.relative_to(own)), "folder", path) for path in _models_in(own)]
    for folder in folders:
        found += [_looked_at(_typed(path), "folder", path) for path in _models_in(folder)]
    for name, folder in cached_models():
        found += _in_hub_cache(name, folder)
    return found


def model_names() -> list[str]:
    """Names of the models that can be loaded from here without a path, for completion."""
    return [one.name for one in find_models() if not one.problem]


def _looked_at(name: str, source: Source, path: Path) -> FoundModel:
    """The model in a file or folder, or the reason why it is none."""
    try:
        if not path.is_file() and not path.is_dir():
            raise ModelError("it is no file, or leads nowhere")
        size = _size(path)
        if path.is_file():
            return FoundModel(name, source, path, size, shape_of_gguf(path))
        if not any(path.glob("*.safetensors")):
            raise ModelError("it has no .safetensors files")
        return FoundModel(name, source, path, size, shape_of_folder(path))
    except (ModelError, OSError) as error:
        reason = str(error.args[0]) if isinstance(error, ModelError) else f"{error.strerror}"
        reason = (
            reason.replace(f"{path} is", "it is").replace(f"{path}/", "").replace(f"{path}", "it")
        )
        return FoundModel(name, source, path, problem=f"cannot be used: {reason}")


def _in_hub_cache(name: str, folder: Path) -> Iterator[FoundModel]:
    """The model of a repository in the cache, and its GGUF files."""
    snapshot = snapshot_of(folder)
    resume = f"sirchat models pull {name}"
    if snapshot is None:
        yield FoundModel(name, "hub", folder, problem=f"incomplete: {resume} goes on")
        return
    files = _below(snapshot)
    ggufs = [path for path in files if _is_gguf(path)]
    for path in ggufs:
        yield _looked_at(f"{name}/{path.relative_to(snapshot)}", "hub", path)
    if (snapshot / "config.json").exists() and not ggufs:
        gone = [path.name for path in files if not path.exists()]
        if gone or not any(path.suffix == ".safetensors" for path in files):
            yield FoundModel(name, "hub", snapshot, problem=f"incomplete: {resume} goes on")
        else:
            yield _looked_at(name, "hub", snapshot)
    elif not ggufs:
        yield FoundModel(name, "hub", snapshot, problem=f"incomplete: {resume} goes on")


def _models_in(folder: Path) -> list[Path]:
    """Model folders and GGUF files in a folder and in folders within it, by name."""
    found = []
    for path in _below(folder):
        if _is_gguf(path):
            found.append(path)
        elif path.name == "config.json" and path.parent != folder:
            found.append(path.parent)
        elif path.name == "config.json":
            return [folder]  # it is a model itself
    return found


def _below(folder: Path) -> list[Path]:
    """The files in a folder, and in folders within it, to a certain depth; none if it is gone."""
    files = list[Path]()
    for folders, (parent, inner, names) in enumerate(os.walk(folder)):
        deep = len(Path(parent).relative_to(folder).parts) >= _DEPTH
        inner[:] = [] if deep or folders > _MOST_FOLDERS else sorted(inner)
        files += [Path(parent) / name for name in sorted(names)]
    return files


def _is_gguf(path: Path) -> bool:
    # A file mmproj-*.gguf is the part of another model that sees pictures.
    return path.suffix.lower() == ".gguf" and not path.name.lower().startswith("mmproj")


def _size(path: Path) -> int:
    """Bytes of a file, or of the files that lie directly in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.iterdir() if one.is_file())


def _typed(path: Path) -> str:
    """A path as it can be given to `--model`."""
    text = str(path)
    return text if "/" in text or path.suffix.lower() == ".gguf" else f"./{text}"
