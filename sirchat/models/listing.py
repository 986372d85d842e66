"""Lists the models on this machine: bundled, in a package, in folders and in the hub's cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sirchat import paths
from sirchat.errors import ModelError
from sirchat.models.names import (
    cached_folder,
    cached_models,
    find_path,
    locate,
    packaged_gguf,
    part_paths,
    snapshot_folder,
    suggest_model,
)
from sirchat.models.shape import ModelShape, shape_of_folder, shape_of_gguf, weights_in_folder
from sirchat.paths import BUNDLED, PACKAGED

Source = Literal["bundled", "package", "folder", "hub"]

_MAX_DEPTH = 3  # levels of a folder of models that are searched: OWNER/NAME/FILE
_MAX_FOLDERS = 5_000


@dataclass(frozen=True)
class FoundModel:
    name: str  # to give to `--model`
    source: Source
    path: Path | None  # file or folder; None if the model is not installed
    size: int = 0  # bytes on disk
    shape: ModelShape | None = None  # None if the files can't be read
    problem: str = ""  # why it can't be used


def find_models(folders: Iterable[Path] = ()) -> list[FoundModel]:
    """List all models on this machine, including those in `folders`."""
    models = [
        _inspect_model(name, "bundled", paths.tiny_model_dir().parent / name) for name in BUNDLED
    ]
    for name in PACKAGED:
        try:
            models.append(_inspect_model(name, "package", packaged_gguf(name)))
        except ModelError as error:
            models.append(FoundModel(name, "package", None, problem=f"not installed: {error.hint}"))
    models += [
        _inspect_model(_own_name(path), "folder", path) for path in _models_in(paths.models_dir())
    ]
    for folder in folders:
        is_model = (folder / "config.json").is_file()
        found = [folder] if is_model else _models_in(folder)
        models += [_inspect_model(_as_typed_path(path), "folder", path) for path in found]
    for name, folder in cached_models():
        models += _in_hub_cache(name, folder)
    return models


def model_names() -> list[str]:
    """Names of the usable models on this machine, for completion."""
    return [model.name for model in find_models() if not model.problem]


def find_model(name: str) -> FoundModel:
    """Find the model that `--model` would load; raises ModelError if there is none, or several."""
    source, gguf_file = locate(name)
    if Path(source).is_dir():
        kind: Source = "package" if name in PACKAGED else "folder"
        path = Path(source, gguf_file)
        models = [_inspect_model(name, "bundled" if name in BUNDLED else kind, path)]
    else:
        folder = cached_folder(name)
        models = list(_in_hub_cache(name, folder)) if folder.is_dir() else []
    if not models:
        hint = f"to download it: sirchat models pull {name}" if "/" in name else suggest_model(name)
        raise ModelError(f"model {name!r} is not on this machine", hint=hint)
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise ModelError(f"{name!r} has several models", hint=f"give one of {names}")
    if models[0].problem:
        raise ModelError(f"model {name!r}: {models[0].problem}")
    return models[0]


def _inspect_model(name: str, source: Source, path: Path) -> FoundModel:
    try:
        if not path.is_file() and not path.is_dir():
            raise ModelError("the path is a broken link, or neither a file nor a folder")
        size = _size(path)
        if path.is_file():
            return FoundModel(name, source, path, size, shape_of_gguf(path))
        if not any(path.glob("*.safetensors")):
            raise ModelError("the folder has no .safetensors files")
        weights_in_folder(path)
        return FoundModel(name, source, path, size, shape_of_folder(path))
    except (ModelError, OSError) as error:
        reason = str(error.args[0]) if isinstance(error, ModelError) else f"{error.strerror}"
        for long, short in ((f"{path} is", "it is"), (f"{path}/", ""), (f"{path}", "it")):
            reason = reason.replace(long, short)
        return FoundModel(name, source, path, problem=f"cannot be used: {reason}")


def _in_hub_cache(name: str, folder: Path) -> Iterator[FoundModel]:
    """Yield the models of a cached repository: each GGUF file, or else the repository itself."""
    snapshot = snapshot_folder(folder)
    incomplete = f"incomplete; to continue: sirchat models pull {name}"
    if snapshot is None:
        yield FoundModel(name, "hub", folder, problem=incomplete)
        return
    files = _files_below(snapshot)
    ggufs = _ggufs_of(files)
    for path in ggufs:
        yield _inspect_model(f"{name}/{path.relative_to(snapshot)}", "hub", path)
    if ggufs:
        return
    has_weights = any(path.suffix == ".safetensors" for path in files)
    is_complete = has_weights and all(path.exists() for path in files)  # broken links: interrupted
    if is_complete and (snapshot / "config.json").exists():
        yield _inspect_model(name, "hub", snapshot)
    else:
        yield FoundModel(name, "hub", snapshot, problem=incomplete)


def _models_in(folder: Path) -> list[Path]:
    files, models = _files_below(folder), list[Path]()
    ggufs = _ggufs_of(files)
    for path in files:
        if path in ggufs:
            models.append(path)
        elif path.name == "config.json":
            models.append(path.parent)
    return models


def _files_below(folder: Path) -> list[Path]:
    files = list[Path]()
    for folders, (parent, inner, names) in enumerate(os.walk(folder)):
        deep = len(Path(parent).relative_to(folder).parts) >= _MAX_DEPTH
        inner[:] = [] if deep or folders > _MAX_FOLDERS else sorted(inner)
        files += [Path(parent) / name for name in sorted(names)]
    return files


def _ggufs_of(files: Iterable[Path]) -> list[Path]:
    """The GGUF files of models; of a model in several parts, the first part that exists."""
    found = dict[Path, Path]()
    for path in files:
        # A file mmproj-*.gguf is the image encoder of another model.
        if path.suffix.lower() == ".gguf" and not path.name.lower().startswith("mmproj"):
            found.setdefault(part_paths(path)[0], path)
    return list(found.values())


def _size(path: Path) -> int:
    files = part_paths(path) if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files if file.is_file())


def _own_name(path: Path) -> str:
    """The name of a model in the user's own folder; its path if the name is another model's."""
    name = str(path.relative_to(paths.models_dir()))
    is_other = name in (*BUNDLED, *PACKAGED) or find_path(name).absolute() != path.absolute()
    return str(path) if is_other else name


def _as_typed_path(path: Path) -> str:
    # As `--model` takes it for a path, not for a name.
    text = str(path)
    return text if "/" in text or path.suffix.lower() == ".gguf" else f"./{text}"
