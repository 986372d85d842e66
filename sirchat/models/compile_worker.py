"""Compiles a decode step in a process of its own: `python -m sirchat.models.compile_worker FILE N`.

The process reads the graph, pickled by `compiled_step.without_weights`, from standard input, and
writes the compiled program to FILE if it can be loaded. N is the process's niceness: a higher one
means lower priority. The process ends when its parent process ends. The exit status is 0 after
success, `TEMPORARY` after an error that may not recur (the disk was full, memory was short), and 1
if this program can't be compiled.
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
"""The prefix of the names of the temporary folders in which decode steps are compiled."""

TEMPORARY = 75
"""The exit status after an error that may not recur at a later start, such as a full disk."""

_TEMPORARY_ERRORS = (
    *("No space left", "Disk quota", "Read-only file system", "Permission denied"),
    *("Killed signal", "allocate memory", "out of memory", "memory exhausted"),
)


def main(path: Path, niceness: int) -> None:
    """Compile the graph from standard input into the file `path`, with a lowered priority.

    The file appears only when it is complete. `niceness` is the number by which the priority is
    lowered.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the chat
    give_way(niceness)
    folder = tempfile.mkdtemp(prefix=UNFINISHED, dir=path.parent)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, lambda *_: _end(folder))
    watch = threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True)
    watch.start()
    try:
        from sirchat.models.compiled_step import build, load_program

        made = Path(folder) / path.name
        build(sys.stdin.buffer.read(), made)
        load_program(made)  # one that crashes ends this process, and not a chat
        os.replace(made, path)
    except Exception as error:
        if is_temporary(error):
            traceback.print_exc()
            sys.exit(TEMPORARY)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_temporary(error: Exception) -> bool:
    """Whether compiling may succeed at a later start, though it failed now with `error`.

    This is true if the disk or memory was full, or if a file could not be read or written. A
    compiler's message, which is part of `error`, may say so, too.
    """
    if isinstance(error, OSError | MemoryError):
        return True
    return any(text in str(error) for text in _TEMPORARY_ERRORS)


def give_way(niceness: int) -> None:
    """Lower the CPU priority of this process by `niceness`, so that a chat's replies stay fast."""
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
