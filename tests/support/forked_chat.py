"""Programs that start fast: forked from a server process that has imported what a chat needs.

Imports take most of a start, some seconds of processor time. Other tests run `python -m sirchat`,
so a normal start is tested too.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context, reduction
from multiprocessing.forkserver import _forkserver
from typing import Any, NoReturn

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["tests.support.chat_imports"])


def start_server() -> None:
    """Start the server, which the first program would start."""
    _forkserver.ensure_running()


def share_server() -> None:
    """Start the server for this process and those that are forked from it."""
    _forkserver.ensure_running()
    _forkserver.ensure_running = _nothing  # type: ignore[method-assign]


def _nothing() -> None:
    """A process that did not start the server can't ask the system whether it runs."""


def fork(
    arguments: Sequence[str],
    env: Mapping[str, str],
    folder: str,
    streams: Mapping[int, int],
    *,
    in_terminal: bool = False,
    begun: int | None = None,
    daemon: bool = True,
) -> Any:
    """Start `python ARGUMENTS`, with open files of this process as its `streams` 0, 1 and 2.

    Those that are missing are closed there. `in_terminal`: stream 0 is its controlling terminal.
    The file `begun` is closed there when nothing is left to do but to run.
    """
    passed = {number: _Passed(descriptor) for number, descriptor in streams.items()}
    ready = None if begun is None else _Passed(begun)
    how = (list(arguments), dict(env), folder, passed, in_terminal, ready)
    process = SERVER.Process(target=_run, args=how, daemon=daemon)
    process.start()
    return process


class _Passed:
    """An open file of this process, pickled for another process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _number_of, (reduction.DupFd(self._number),)


def _number_of(passed: Any) -> int:
    return int(passed.detach())


def _run(
    arguments: list[str],
    env: dict[str, str],
    folder: str,
    streams: dict[int, int],
    in_terminal: bool,
    begun: int | None,
) -> NoReturn:
    """In the new process: take the streams, and do what `python` does after sirchat's imports."""
    if in_terminal:
        os.login_tty(streams[0])
    else:
        os.setsid()
        for number in range(3):
            if number in streams:
                os.dup2(streams[number], number)
            else:
                os.close(number)
        for descriptor in streams.values():
            os.close(descriptor)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"))
    with suppress(OSError):
        files["stdin"] = os.fdopen(0, encoding=encoding, closefd=False)
    with suppress(OSError):
        files["stdout"] = os.fdopen(1, "w", encoding=encoding, closefd=False)
    with suppress(OSError):
        files["stderr"] = os.fdopen(2, "w", encoding=encoding, closefd=False)
        files["stderr"].reconfigure(errors="backslashreplace")
    vars(sys).update(files | {f"__{name}__": file for name, file in files.items()})
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    sys.argv = arguments[kind == "-m" :]
    sys.path.insert(0, folder if kind else os.path.dirname(sys.argv[0]))
    if begun is not None:
        os.close(begun)
    code: Any = 0
    try:
        if kind == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        elif kind:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leave:
        code = leave.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)  # noqa: T201
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    """End as Python does: after its threads and exit functions, with 120 for a full output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)
