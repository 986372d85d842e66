"""A `python` whose imports are done, for tests that start the program from a shell or by pipes.

`warm_python()` begins a command line in place of `sys.executable`. Behind it a client (see
`warm_client`) passes streams and signals to a process forked from one that has imported what
sirchat needs; a normal start takes three seconds of processor time for that. Tests of the start
itself, of limits (`ulimit`) and of job control run `sys.executable`.
"""

from __future__ import annotations

import ast
import os
import shlex
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

from forked_chat import fork, start_server


@cache
def warm_python() -> tuple[str, ...]:
    """Program and first arguments; what follows are `-m MODULE` or a script, and its arguments."""
    start_server()  # in the folder of now: a test may go to one whose modules fail
    path = str(Path(tempfile.mkdtemp(prefix="warm")) / "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    threading.Thread(target=_serve, args=(listening,), daemon=True).start()
    return sys.executable, "-ISE", str(Path(__file__).with_name("warm_client.py")), path


def _serve(listening: socket.socket) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=_run, args=(client,), daemon=True).start()


def _run(client: socket.socket) -> None:
    """Run what one client asks for; if the client is killed, kill it."""
    size, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    request = b""
    while len(request) < int.from_bytes(size):
        request += client.recv(65536)
    streams, arguments, environ, folder = ast.literal_eval(request.decode())
    process = fork(arguments, environ, folder, dict(zip(streams, descriptors, strict=True)))
    for descriptor in descriptors:
        os.close(descriptor)
    client.sendall((process.pid or 0).to_bytes(4))
    if process.sentinel not in wait([process.sentinel, client]):
        process.kill()
    process.join()
    with suppress(OSError):  # it was killed
        client.sendall((process.exitcode or 0).to_bytes(4, signed=True))
    client.close()


def warm_program(path: Path) -> str:
    """A program at `path` that runs what `python [-P] ARGUMENTS` would; returns the path.

    A script is run with the folder of `path` on its path, too.
    """
    begin = path.with_name(f"{path.name}_begin.py")
    begin.write_text(
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        encoding="utf-8",
    )
    warm = shlex.join(warm_python())
    lines = [
        '[ "$1" = -P ] && shift',
        f'[ "$1" = -m ] && exec {warm} "$@"',
        f'exec {warm} {shlex.quote(str(begin))} "$@"',
    ]
    return _written(path, lines)


def fresh_once(path: Path) -> str:
    """A program at `path` that is this Python when it runs first, and later a warm one.

    It fails if `-P` is not its first argument, or if an entry of PYTHONPATH is the current folder.
    """
    warm = warm_program(path.with_name(f"{path.name}_warm"))
    lines = [
        'case "$1:$PYTHONPATH:" in -P:*::*) exit 9;; -P:*) ;; *) exit 9;; esac',
        f"if mkdir {shlex.quote(str(path))}_ran 2>/dev/null",
        f'then exec {shlex.quote(sys.executable)} "$@"',
        f'else exec {shlex.quote(warm)} "$@"',
        "fi",
    ]
    return _written(path, lines)


def _written(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
    path.chmod(0o700)
    return str(path)
