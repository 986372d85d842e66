"""Folders of archives on disk: private, locked while in use, and removed with their process.

A process that is killed can't remove its folder. So each folder has a lock, which the system frees
when the process ends, however it ends; `sweep` removes the folders whose lock is free.
"""

from __future__ import annotations

import shutil
import time
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sirchat.paths import private_dir

_LOCK = ".lock"
_OLD = 24 * 3600  # seconds after which a lock without a folder is litter


class ArchiveFolder:
    """A folder that is removed with all its files when the program ends, or at `remove`.

    Attributes:
        path: where it is, once `make` was called.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock_of(path)
        self.remove = weakref.finalize(self, _remove, path, self._lock)

    def make(self) -> None:
        """Make the folder, private and locked, unless it is there; raises OSError if it can't."""
        private_dir(self.path.parent)
        if not self._lock.is_locked:
            self._lock.acquire(blocking=False)  # before the folder, lest another process sweep it
        private_dir(self.path)


def sweep(parent: Path) -> None:
    """Remove the archives in `parent` whose processes have gone; what can't be removed stays."""
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            if path.is_symlink():
                continue
            is_litter = path.suffix == _LOCK and not path.with_suffix("").exists()
            if is_litter and time.time() - path.stat().st_mtime > _OLD:
                path.unlink()
            elif path.is_dir():
                lock = _lock_of(path)
                with suppress(Timeout, OSError):
                    lock.acquire(blocking=False)
                    _remove(path, lock)


def _lock_of(path: Path) -> FileLock:
    return FileLock(path.with_name(path.name + _LOCK), mode=0o600, thread_local=False)


def _remove(path: Path, lock: FileLock) -> None:
    if not lock.is_locked:  # there is nothing, or it is another process's
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.release()
    with suppress(OSError):
        Path(lock.lock_file).unlink()
