"""Paths of sirchat's files; and functions that make folders and files only the owner can read.

If the environment variable `SIRCHAT_HOME` names a folder, the folders `config`, `data` and `state`
are in this folder. Otherwise they are where the operating system puts such folders.
"""

from __future__ import annotations

import os
import secrets
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from platformdirs import PlatformDirs

from sirchat.errors import UsageError, format_value


def config_dir() -> Path:
    """The folder of the user's settings; it contains the folder of the user's profiles."""
    return _under_home("config") or _usual("config")


def data_dir() -> Path:
    """The folder of the user's data: saved conversations, archives and models."""
    return _under_home("data") or _usual("data")


def state_dir() -> Path:
    """The folder of files that can be deleted without harm, such as the history of typed lines."""
    return _under_home("state") or _usual("state")


def user_profiles_dir() -> Path:
    """The folder of the user's own profiles, which are YAML files of settings."""
    return config_dir() / "profiles"


def history_file() -> Path:
    """The file with the history of lines typed at the prompt; the arrow keys show these lines."""
    return state_dir() / "history"


def sessions_dir() -> Path:
    """The folder of saved conversations."""
    return data_dir() / "sessions"


def served_dir() -> Path:
    """The folder of the conversations that `sirchat serve` has saved."""
    return data_dir() / "served"


def server_socket(model: str) -> Path:
    """The path of the Unix socket at which the user's server for this model answers.

    `model` is the model's name or path, as in the setting `model`.
    """
    path = Path(os.path.expanduser(model))
    name = str(path.absolute()) if path.exists() else model
    return state_dir() / "servers" / f"{sha256(name.encode()).hexdigest()[:12]}.sock"


def models_dir() -> Path:
    """The folder of the user's own models; a setting can name a model in it without its path."""
    return data_dir() / "models"


def scorer_files(model: str) -> tuple[Path, Path]:
    """The two paths at which the scorer of `model` can be: in the user's data, in the package.

    A scorer is a small file of weights for the eviction policy `learned`. If `model` is a folder or
    a file, the name of the scorer's file is made from the absolute path of the model.
    """
    path = Path(os.path.expanduser(model))
    name = str(path.absolute()) if path.exists() else model
    file = f"{quote(name, safe='')}.safetensors"
    return data_dir() / "scorers" / file, _package() / "scorers" / file


def archives_dir() -> Path:
    """The folder in which running chats store evicted tokens (setting `archive: disk`)."""
    return data_dir() / "archives"


def compiled_dir() -> Path:
    """The folder of compiled programs that generate tokens; deleted ones are compiled again."""
    return state_dir() / "compiled"


def shipped_profiles_dir() -> Path:
    """The folder of the profiles that come with sirchat.

    It is in the installed package or, if sirchat runs from its source tree, beside the package.
    """
    packaged = _package() / "profiles"
    return packaged if packaged.is_dir() else _package().parent / "profiles"


def tiny_dir() -> Path:
    """The folder of the model `tiny`, which comes with sirchat: weights, tokenizer, model card."""
    return _package() / "tiny"


def abbreviated(path: Path) -> str:
    """The path as text, with `~` for the user's home folder, which would show the user's name."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):  # it is not in the home folder, or there is none
        return str(path)


def private_dir(path: Path) -> Path:
    """Make the folder `path` and its missing parents, with mode 0700; returns `path`.

    Existing folders keep their mode. Raises OSError if a folder can't be made.
    """
    for folder in reversed([path, *path.parents]):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open the file `path` as `open()` does; a new file has mode 0600.

    Text is encoded in UTF-8. Raises OSError as `open()` does.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=_owner_only)


def write_private(path: Path, text: str, *, replaces: bool) -> None:
    """Write `text` to the file `path`, which only its owner can read.

    An existing file is replaced if `replaces` is true; otherwise FileExistsError is raised. Raises
    OSError if writing fails; then no partial file is left.
    """
    new = path.with_name(f".sirchat-{secrets.token_hex(4)}.new") if replaces else path
    file = open_private(new, "x")
    try:
        with file:
            file.write(text)
        if replaces:
            os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _under_home(part: str) -> Path | None:
    home = os.environ.get("SIRCHAT_HOME")
    if not home:
        return None
    folder = Path(os.path.expanduser(home))
    if folder.parts[0].startswith("~"):
        raise UsageError(f"SIRCHAT_HOME {format_value(home)} names a user that does not exist")
    return folder.absolute() / part


def _usual(part: str) -> Path:
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


def _package() -> Path:
    return Path(__file__).resolve().parent
