"""Servers for tests at a port of this machine: in a thread, or `sirchat serve` in a process."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from serving import Served
from warm_python import warm_python


@contextmanager
def listening(one: Served) -> Iterator[str]:
    """Context manager: the server listens at a free port; yields its address."""
    running = uvicorn.Server(uvicorn.Config(one.server.app, port=0, log_level="critical"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


@contextmanager
def serve_program(home: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Context manager: `sirchat serve` at a free port; yields the process, and its address."""
    with subprocess.Popen(
        [*warm_python(), "-m", "sirchat", "serve", "--port", "0", *flags],
        env=os.environ | {"SIRCHAT_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("sirchat serves "), process.stderr.read()
        yield process, line.split()[4]
