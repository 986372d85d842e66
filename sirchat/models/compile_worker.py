"""Compiles a decode step in a process of its own: `python -m sirchat.models.compile_worker FILE N`.

The process reads the graph, pickled by `compiled_step.without_weights`, from standard input, and
writes the program to FILE. N is the process's niceness: a higher one means lower priority. The
process ends when the one that started it ends. The exit status is 0 after success, `TEMPORARY` if
the disk is full or memory is short, and 1 if this program can't be compiled.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

UNFINISHED = "making-"
"""With this begin the names of folders in which programs are compiled."""

TEMPORARY = 75
"""Exit status for an error that may not happen again at another start."""

_TEMPORARY_ERRORS = (
    *("No space left", "Disk quota", "Read-only file system", "Permission denied"),
    *("Killed signal", "allocate memory", "out of memory", "memory exhausted"),
)


def main(path: Path, niceness: int) -> None:
    """Compile the graph on standard input into the file `path`, which appears when complete."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the chat
    give_way(niceness)
    folder = tempfile.mkdtemp(prefix=UNFINISHED, dir=path.parent)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, lambda *_: _end(folder))
    watch = threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True)
    watch.start()
    try:
        from sirchat.models.compiled_step import build

        build(sys.stdin.buffer.read(), Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)
    except Exception as error:
        if is_temporary(error):
            traceback.print_exc()
            sys.exit(TEMPORARY)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_temporary(error: Exception) -> bool:
    """Whether an error, or a compiler's message in it, means that disk or memory is full."""
    if isinstance(error, OSError | MemoryError):
        return True
    return any(text in str(error) for text in _TEMPORARY_ERRORS)


def give_way(niceness: int) -> None:
    """Lower this process's priority by `niceness`, so that it does not slow down replies."""
    os.nice(niceness)
    if niceness and os.path.exists("/proc/self/autogroup"):
        # Linux shares processors among sessions first, each with a priority of its own.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")


def _end_with(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    _end(folder)


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # ends the compiler, too: both form a process group


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), int(sys.argv[2]))
