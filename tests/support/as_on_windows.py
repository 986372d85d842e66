"""Runs `sirchat ARGUMENTS` as if on Windows: `python as_on_windows.py ARGUMENTS`.

From sirchat's own code it hides what the standard library lacks there; other packages have ways of
their own for Windows, which can't be run here. No file that is open can be deleted or replaced, and
no file can have a name that Windows refuses. `LACKING` names more modules that can't be imported.
"""

from __future__ import annotations

import builtins
import mmap
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import Any

_MISSING = {
    "os": """chown fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg
    getpgid getpgrp getpriority getsid getuid killpg lchown lockf login_tty mkfifo mknod nice
    openpty pathconf pipe2 posix_fadvise posix_spawn posix_spawnp pread preadv pwrite pwritev readv
    sched_getaffinity sched_setaffinity sched_yield sendfile setgid setpgid setpgrp setpriority
    setsid setuid splice statvfs fstatvfs sync sysconf tcgetpgrp tcsetpgrp ttyname uname wait wait3
    wait4 writev WNOHANG O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW
    O_NONBLOCK O_SYNC""",
    "signal": """SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP
    SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2 SIGWINCH ITIMER_PROF ITIMER_REAL alarm pause
    pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait""",
    "socket": "AF_UNIX send_fds recv_fds SO_REUSEPORT MSG_DONTWAIT",
    "mmap": "MADV_DONTNEED MADV_WILLNEED MADV_RANDOM MADV_FREE MAP_PRIVATE MAP_SHARED PROT_READ",
    "time": "clock_gettime clock_settime tzset",
}
_MODULES = {
    *("curses", "crypt", "fcntl", "grp", "nis", "ossaudiodev", "posix", "pty", "pwd", "readline"),
    *("resource", "spwd", "syslog", "termios", "tty"),
    *os.environ.get("LACKING", "").split(),
}
_RESERVED = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$')


class _Mapped(mmap.mmap):
    @property
    def madvise(self) -> Any:
        raise AttributeError("madvise")


_HIDDEN = {module: set(names.split()) for module, names in _MISSING.items()}
_OTHER: dict[str, dict[str, Any]] = {
    "os": {"name": "nt"},
    "sys": {"platform": "win32"},
    "mmap": {"mmap": _Mapped},
}
_frame, _import = sys._getframe, builtins.__import__


class _Lacking(ModuleType):
    """A module of the standard library as sirchat's code would find it on Windows."""

    def __getattribute__(self, name: str) -> Any:
        own, usual = ModuleType.__getattribute__(self, "__name__"), ModuleType.__getattribute__
        if _is_ours(_frame(1).f_globals):
            if name in _OTHER.get(own, ()):
                return _OTHER[own][name]
            if name in _HIDDEN.get(own, ()):
                raise AttributeError(f"module {own!r} has no attribute {name!r} on Windows")
        return usual(self, name)


def _is_ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] == "sirchat"


def _import_less(name: str, names: Any = None, *rest: Any, **more: Any) -> Any:
    if name.partition(".")[0] in _MODULES and _is_ours(names or {}):
        raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
    return _import(name, names, *rest, **more)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: raise the error that Windows would raise."""
    if event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & os.O_CREAT:
        _refuse_name(os.fsdecode(arguments[0]))
    elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir"):
        for path in map(os.fsdecode, arguments[: 2 if event == "os.rename" else 1]):
            _refuse_name(path)
            if not path.endswith(".lock") and os.path.realpath(path) in _open_files():
                raise PermissionError(13, "The process cannot access the file: it is open", path)


def _refuse_name(path: str) -> None:
    if _RESERVED.search(os.path.basename(path)):
        raise OSError(22, "Invalid argument", path)


def _open_files() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(maxsplit=5)[-1].strip() for line in maps}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _check() -> None:
    """See that what is missing is hidden from sirchat's code, and from no other."""
    code = "import os, sys; found = hasattr(os, 'getuid'), sys.platform, os.name"
    for name, expected in (("sirchat.x", (False, "win32", "nt")), ("x", (True, "linux", "posix"))):
        names: dict[str, object] = {"__name__": name}
        exec(code, names)
        assert names["found"] == expected


def main() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sirchat"]:
        del sys.modules[name]  # so that it is imported anew, as on Windows
    for module in (os, sys, signal, socket, mmap, time):
        module.__class__ = _Lacking
    builtins.__import__ = _import_less  # type: ignore[assignment]
    sys.addaudithook(_refuse)
    _check()
    sys.argv[0] = "sirchat"
    from sirchat.cli import main

    main()


if __name__ == "__main__":
    main()
