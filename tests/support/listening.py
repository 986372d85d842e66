"""A server for tests at a port of this machine, for clients that bring their own connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from serving import Served


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
