"""Compiles a decode step: `python -m sirchat.models.compile_worker FILE NICENESS PARENT`.

Reads the graph from standard input and writes the program to FILE (without a graph: the library of
products), in a process of its own, which ends with this one, and both with the process PARENT. Exit
status: 0, `TEMPORARY`, 1 if this program can't be compiled, or 128 + the number of the signal that
ended the compiling process.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from sirchat.models.background import lower_priority

# The prefix of the names of the temporary folders in which decode steps are compiled.
UNFINISHED = "making-"

# The exit status after an error that may not recur at a later start, such as a full disk.
TEMPORARY = 75

_TEMPORARY_ERRORS = (
    *("No space left", "Disk quota", "Read-only file system", "Permission denied"),
    *("Killed signal", "allocate memory", "out of memory", "memory exhausted"),
)


def main(path: Path, niceness: int, parent: int) -> None:
    """Compile the graph from standard input into the file `path`, which appears only complete."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the chat
    lower_priority(niceness)
    pickled = sys.stdin.buffer.read()
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=path.parent))
    # Deleted by a process that writes nothing itself, as compiling may crash, and after the
    # compilers have ended: what they write meanwhile would stay.
    multiprocessing.set_start_method("fork", force=True)  # not on Windows, see `has_compiler`
    work = multiprocessing.Process(target=_compile, args=(pickled, folder, path))
    try:
        work.start()
        while work.exitcode is None and not asked_to_end and os.getppid() == parent:
            work.join(0.1)
        code = work.exitcode
        _end(work)
    finally:
        _delete(folder)
    if code is None:
        code = -signal.SIGTERM
    sys.exit(code if code >= 0 else 128 - code)


def _compile(pickled: bytes, folder: Path, path: Path) -> None:
    if sys.platform != "win32":
        os.setpgrp()  # with the compilers, but without the process that waits
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        from sirchat.models.compiled_step import compile_graph, load_program
        from sirchat.models.products import build_library, library_name, load_library

        # What crashes while it is loaded ends this process, and not a chat.
        made, library = folder / path.name, path.with_name(library_name())
        if pickled:
            if library.exists():
                load_library(library)
            compile_graph(pickled, made)
            load_program(made)
        else:
            build_library(made)
            load_library(made)
        os.replace(made, path)
    except Exception as error:
        if is_temporary(error):
            traceback.print_exc()
            sys.exit(TEMPORARY)
        raise


def is_temporary(error: Exception) -> bool:
    """Whether compiling may succeed at a later start: if the disk or memory was full, say."""
    if isinstance(error, OSError | MemoryError):
        return True
    return any(text in str(error) for text in _TEMPORARY_ERRORS)


def _end(work: multiprocessing.process.BaseProcess) -> None:
    assert work.pid is not None
    if sys.platform != "win32":
        with suppress(OSError):  # it has just begun, or nobody is left
            os.killpg(work.pid, signal.SIGKILL)
    work.kill()
    work.join()


def _delete(folder: Path) -> None:
    end = time.monotonic() + 5
    while folder.exists() and time.monotonic() < end:  # what was killed may still end a call
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
