"""Background processes that outlive the command that started them, at most one of each kind.

One kind writes a prepared file, another learns a sentence encoder. While a process runs, it locks
the file of its kind, which all homes of a user share: each process takes a whole processor.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from sirchat.paths import make_private_dir, state_dir

if sys.platform != "win32":
    import fcntl

_LOWEST_PRIORITY = 19  # niceness
_WRITER_LOCK = "background"  # the lock of what writes a prepared file
# Whatever the environment says: `XDG_RUNTIME_DIR` differs between a session, cron and ssh.
_SHARED_FOLDER = Path("/dev/shm")


def lock_file(name: str) -> Path:
    """The file that a background process locks while it works; its text may name the work."""
    if sys.platform != "win32" and os.access(_SHARED_FOLDER, os.W_OK | os.X_OK):
        shared = _SHARED_FOLDER / f"sirchat-{os.getuid()}-{name}.lock"
        if not os.path.lexists(shared) or shared.lstat().st_uid == os.getuid():
            return shared  # others may write into that folder, too
    return state_dir() / f"{name}.lock"


def lock(name: str = _WRITER_LOCK) -> int | None:
    """Lock the file of a kind; None if another process holds it, or if that fails.

    The lock lasts until the descriptor is closed here and in all processes forked with it.
    """
    with suppress(OSError):
        make_private_dir(lock_file(name).parent)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # others may put one into a folder in memory
        descriptor = os.open(lock_file(name), os.O_CREAT | os.O_RDWR | no_link, 0o600)
        try:
            if sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def is_running(name: str = _WRITER_LOCK) -> bool:
    if (descriptor := lock(name)) is not None:
        os.close(descriptor)
    return descriptor is None


def lower_priority(process: int) -> None:
    """Give a single-threaded process the lowest priority, so that a chat's replies stay fast."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, _LOWEST_PRIORITY)
    # Linux shares processors among sessions first, each with a priority of its own.
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(_LOWEST_PRIORITY), encoding="ascii")


def detach_from_parent(lock: int) -> None:
    """After a fork, leave the parent's session and files, except `lock`, and lower the priority."""
    if sys.platform == "win32":  # which has no fork
        return
    os.setsid()
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # else who reads its output would wait for this process, too
        os.dup2(null, number)
    os.closerange(3, lock)
    os.closerange(lock + 1, 1 << 16)
    lower_priority(os.getpid())
