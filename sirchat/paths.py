"""Paths of sirchat's files, and private folders and files, which only their owner can read.

`SIRCHAT_HOME`, when set, is the parent of all three folders: `config`, `data` and `state`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from platformdirs import PlatformDirs

from sirchat.errors import UsageError, format_value


def config_dir() -> Path:
    """The folder of the user's settings: profiles."""
    return _under_home("config") or _platform().user_config_path


def data_dir() -> Path:
    """The folder of the user's data: saved conversations, archives and models."""
    return _under_home("data") or _platform().user_data_path


def state_dir() -> Path:
    """The folder of files that can be deleted without harm: the input history, compiled steps."""
    return _under_home("state") or _platform().user_state_path


def user_profiles_dir() -> Path:
    """The folder of the user's own profiles."""
    return config_dir() / "profiles"


def history_file() -> Path:
    """The file of lines typed at the prompt, which the arrow keys show again."""
    return state_dir() / "history"


def sessions_dir() -> Path:
    """The folder of saved conversations."""
    return data_dir() / "sessions"


def models_dir() -> Path:
    """The folder of the user's own models; a model in it can be named without its path."""
    return data_dir() / "models"


def scorer_files(model: str) -> tuple[Path, Path]:
    """The files in which a model's scorer can be: the user's own, and the one in the package.

    A folder or file is named by its absolute path, so that each has a scorer of its own.
    """
    path = Path(os.path.expanduser(model))
    name = str(path.absolute()) if path.exists() else model
    file = f"{quote(name, safe='')}.safetensors"
    return data_dir() / "scorers" / file, _package() / "scorers" / file


def archives_dir() -> Path:
    """The folder of running chats' archives (`archive: disk`)."""
    return data_dir() / "archives"


def compiled_dir() -> Path:
    """The folder of compiled decode steps; a missing one is compiled again."""
    return state_dir() / "compiled"


def shipped_profiles_dir() -> Path:
    """The folder of shipped profiles: in the package, or beside it in a source checkout."""
    packaged = _package() / "profiles"
    return packaged if packaged.is_dir() else _package().parent / "profiles"


def tiny_dir() -> Path:
    """The folder of the bundled model: weights, tokenizer, model card."""
    return _package() / "tiny"


def abbreviated(path: Path) -> str:
    """A path with `~` for the home folder, so that it can be shown to others."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):  # it is not in the home folder, or there is none
        return str(path)


def private_dir(path: Path) -> Path:
    """Make `path` and its missing parents with mode 0700; existing folders are not changed.

    Raises OSError where a folder can't be made.
    """
    for folder in reversed([path, *path.parents]):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open `path` like `open()`, text as UTF-8; a file that it creates has mode 0600.

    Raises OSError like `open()`.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=_owner_only)


def write_private(path: Path, text: str, *, replaces: bool) -> None:
    """Write a file that only its owner can read, whole or not at all.

    Unless it `replaces` the file that is there, raises FileExistsError for one. Raises OSError.
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


def _platform() -> PlatformDirs:
    return PlatformDirs("sirchat", appauthor=False)


def _package() -> Path:
    return Path(__file__).resolve().parent
