"""Files of a session: created private, and synced to the drive."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from sirchat import paths
from sirchat.errors import SessionError

_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # none that look alike; no vowels, so no words


def new_file(folder: Path, suffix: str) -> Path:
    """Create an empty private file with a name that no other session has; raises SessionError."""
    created = time.strftime("%Y%m%d-%H%M")
    try:
        paths.private_dir(folder)
        while True:
            letters = "".join(secrets.choice(_LETTERS) for _ in range(4))
            path = folder / f"{created}-{letters}{suffix}"
            try:
                paths.open_private(path, "xb").close()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise SessionError(f"no session can be saved in {folder}: {error.strerror}") from None


def sync(path: Path) -> None:
    """Sync a file or folder to the drive, so that a power loss does not undo what was written."""
    if os.name == "nt" and path.is_dir():  # Windows can't open folders
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
