"""Files of a session: private from the start, and on the drive before anybody relies on them."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from sirchat import paths
from sirchat.errors import SessionError

_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # none that look alike, no vowels: no words


def new_file(folder: Path, suffix: str) -> Path:
    """An empty private file of a name that no other session has."""
    began = time.strftime("%Y%m%d-%H%M")
    try:
        paths.private_dir(folder)
        while True:
            letters = "".join(secrets.choice(_LETTERS) for _ in range(4))
            path = folder / f"{began}-{letters}{suffix}"
            try:
                paths.open_private(path, "xb").close()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise SessionError(f"no session can be saved in {folder}: {error.strerror}") from None


def sync(path: Path) -> None:
    """Make what is written to a file or folder outlast a power loss."""
    if os.name == "nt" and path.is_dir():  # there, folders can't be opened
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
