"""What the name of a model stands for: a bundled one, a file, a folder, or a name on the hub.

Imports nothing heavy, so that a mistyped name fails at once.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from sirchat import paths
from sirchat.errors import ModelError, format_value
from sirchat.models.hub_cache import cached_gguf, split_gguf_name
from sirchat.models.packaged import PACKAGED, packaged_gguf

BUNDLED = ("tiny", "tiny-anchor")
"""Names of the models that come with sirchat."""

_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def locate(name: str) -> tuple[str, dict[str, str]]:
    """Where the model is: a folder or a name on the hub; and the option that names a GGUF file.

    Raises ModelError for what is neither here nor a name that the hub could know.
    """
    try:
        return _located(name)
    except (OSError, ValueError, RuntimeError) as error:  # too long; with a NUL; ~ of nobody
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"model {format_value(name)} can't be looked for: {reason}") from error


def _located(name: str) -> tuple[str, dict[str, str]]:
    if name in BUNDLED:
        return str(paths.tiny_dir().parent / name), {}
    path = packaged_gguf(name) if name in PACKAGED else _own(name)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            hint = _nearest(name, path)
            if (parts := split_gguf_name(name)) and not path.parent.is_dir():
                hint = f"if it is on the hub: sirchat models pull {parts[0]} --file {parts[1]}"
            raise ModelError(f"model file {name!r} does not exist", hint=hint)
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        _check_folder(name, path)
        return str(path), {}
    if path.is_file():
        raise ModelError(f"model {name!r} is a file, but no .gguf", hint="give its folder")
    is_path = name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1
    if is_path or not _ON_HUB.fullmatch(name):
        raise ModelError(f"model folder {name!r} does not exist", hint=_nearest(name, path))
    return name, {}


def _own(name: str) -> Path:
    """The path that a name means: as it is, in the user's folder of models, or a cached GGUF."""
    path = Path(os.path.expanduser(name))
    if path.exists() or path.is_absolute():
        return path
    kept = paths.models_dir() / path
    if ".." not in path.parts and kept.exists():
        return kept
    return cached_gguf(name) or path


def suggestion(name: str) -> str:
    """The models that can be had for sure, the one of the most similar name first."""
    known = (*BUNDLED, *PACKAGED)
    if similar := get_close_matches(name, known, 1):
        return f"did you mean {similar[0]}?"
    return f"give {', '.join(known)}, a folder with safetensors, a .gguf file, or a hub id"


def _check_folder(name: str, folder: Path) -> None:
    """Raise ModelError for a folder that holds no model."""
    found = sorted(one.name for one in folder.iterdir())
    ggufs = [one for one in found if one.lower().endswith(".gguf")]
    if "config.json" not in found:
        hint = f"give the file: {folder / ggufs[0]}" if ggufs else suggestion(folder.name)
        raise ModelError(f"model folder {name!r} has no config.json", hint=hint)
    if not any(one.endswith(".safetensors") for one in found):
        raise ModelError(
            f"model folder {name!r} has no weights", hint="they must be .safetensors files"
        )


def _nearest(name: str, path: Path) -> str:
    """What may have been meant by a path that does not exist: what lies beside it, or a model."""
    parent = path.parent
    beside = [one.name for one in parent.iterdir()] if parent.is_dir() else []
    if similar := get_close_matches(path.name, beside, 1):
        return f"did you mean {parent / similar[0]}?"
    return suggestion(name)
