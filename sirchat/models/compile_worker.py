"""Compiles a decode step in a process of its own: `python -m sirchat.models.compile_worker FILE N`.

Reads the graph from standard input and writes the program to FILE; N is the niceness. Ends with its
parent. Exit status: 0, `TEMPORARY`, or 1 if this program can't be compiled.
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

# The prefix of the names of the temporary folders in which decode steps are compiled.
UNFINISHED = "making-"

# The exit status after an error that may not recur at a later start, such as a full disk.
TEMPORARY = 75

_TEMPORARY_ERRORS = (
    *("No space left", "Disk quota", "Read-only file system", "Permission denied"),
    *("Killed signal", "allocate memory", "out of memory", "memory exhausted"),
)


def main(path: Path, niceness: int) -> None:
    """Compile the graph from standard input into the file `path`, which appears only complete."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the chat
    lower_priority(niceness)
    folder = tempfile.mkdtemp(prefix=UNFINISHED, dir=path.parent)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, lambda *_: _end(folder))
    watch = threading.Thread(target=_end_after, args=(os.getppid(), folder), daemon=True)
    watch.start()
    try:
        from sirchat.models.compiled_step import compile_graph, load_program

        made = Path(folder) / path.name
        compile_graph(sys.stdin.buffer.read(), made)
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
    """Whether compiling may succeed at a later start: if the disk or memory was full, say."""
    if isinstance(error, OSError | MemoryError):
        return True
    return any(text in str(error) for text in _TEMPORARY_ERRORS)


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, so that a chat's replies stay fast."""
    os.nice(niceness)
    if niceness and os.path.exists("/proc/self/autogroup"):
        # Linux shares processors among sessions first, each with a priority of its own.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")


def _end_after(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    _end(folder)


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # ends the compiler, too: both form a process group


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), int(sys.argv[2]))
