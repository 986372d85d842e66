"""Private folders for files that must go when the program ends, such as those of the archive.

A killed process can't remove its folder. So each folder has a lock, which the operating system
frees when the process ends in any way, and `remove_stale_folders` looks for freed locks.
"""

from __future__ import annotations

import shutil
import time
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sirchat.paths import make_private_dir

_LOCK_SUFFIX = ".lock"
_STALE_LOCK_SECONDS = 24 * 3600  # seconds after which a lock without a folder is removed


class ArchiveFolder:
    """A folder that is deleted with all its files when the program ends or `remove` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock_of(path)
        self.remove = weakref.finalize(self, _remove, path, self._lock)

    def make(self) -> None:
        """Make the folder, unless it exists, for this user alone, and lock it; raises OSError."""
        make_private_dir(self.path.parent)
        if not self._lock.is_locked:
            self._lock.acquire(blocking=False)  # first, so that no other process sweeps it
        make_private_dir(self.path)


def remove_stale_folders(parent: Path) -> None:
    """Delete the folders in `parent` whose processes have ended, where possible."""
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            if path.is_symlink():
                continue
            is_stale_lock = path.suffix == _LOCK_SUFFIX and not path.with_suffix("").exists()
            if is_stale_lock and time.time() - path.stat().st_mtime > _STALE_LOCK_SECONDS:
                path.unlink()
            elif path.is_dir():
                lock = _lock_of(path)
                with suppress(Timeout, OSError):
                    lock.acquire(blocking=False)
                    _remove(path, lock)


def _lock_of(path: Path) -> FileLock:
    return FileLock(path.with_name(path.name + _LOCK_SUFFIX), mode=0o600, thread_local=False)


def _remove(path: Path, lock: FileLock) -> None:
    if not lock.is_locked:  # there is no folder, or another process uses it
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.release()
    with suppress(OSError):
        Path(lock.lock_file).unlink()
