"""The HTTP server of `sirchat serve`: uvicorn, which no client keeps from answering others."""

import sys
import time
from socket import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sirchat.errors import shows_tracebacks
from sirchat.server.app import ChatServer

_SHUTDOWN_SECONDS = 3  # how long open connections may go on after a signal
_MAX_CONNECTIONS = 4096  # if the system allows so many open files
_RESERVED_FILES = 256  # open files that the program needs beside its connections
_BACKLOG = 128  # connections that wait to be accepted


class Connection(H11Protocol):
    """With too many connections, closes the oldest that waits for a request or is closing."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.opened_at = time.monotonic()
        if len(self.connections) > _connection_limit():
            all_open = [other for other in self.connections if isinstance(other, Connection)]
            waiting = filter(Connection.is_idle, all_open)
            oldest = min(waiting, key=lambda connection: connection.opened_at)
            self.connections.discard(oldest)  # uvicorn does so only a little later
            oldest.transport.abort()

    def is_idle(self) -> bool:
        cycle: Any = self.cycle
        is_free = cycle is None or cycle.response_complete or cycle.more_body
        return is_free or self.transport.is_closing()


class Server(uvicorn.Server):
    """Serves HTTP; a signal ends the replies under way, and then the server."""

    def __init__(self, chats: ChatServer) -> None:
        config = uvicorn.Config(
            chats.app,
            http=Connection,
            backlog=_BACKLOG // 8,
            log_level="debug" if shows_tracebacks() else "warning",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._chats = chats

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._chats.replies.end()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio has set `backlog`, how many it accepts at once


def _connection_limit() -> int:
    if sys.platform != "win32":
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files >= 0:  # else there is no limit
            return min(_MAX_CONNECTIONS, max(files // 4, files - _RESERVED_FILES))
    return _MAX_CONNECTIONS
