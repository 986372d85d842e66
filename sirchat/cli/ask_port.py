"""How `sirchat ask` finds a running server of the same user, and how each proves to be that user's.

The server listens on a second local port, and writes that port and a token to a file which only
the user can read. A server that was killed leaves its file, and another program may take the port:
so a server first proves that it knows the token, without sending it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from sirchat import paths

_HOST = "127.0.0.1"
_PROOF_TIMEOUT_S = 2.0  # within which a server must prove itself
_TOKEN_HEADER, _CHALLENGE_HEADER, _PROOF_HEADER = (
    "sirchat-token",
    "sirchat-challenge",
    "sirchat-proof",
)  # headers


class AskPort(NamedTuple):
    """The port of a server for `ask`, and the token that programs of its user can read."""

    port: int
    token: str

    def proof(self, challenge: bytes) -> str:
        """The answer to a challenge that only those who know the token can give."""
        return hmac.new(self.token.encode(), challenge, "sha256").hexdigest()

    def opened(self, app: Any) -> Any:
        """The ASGI app `app`, which at this port answers challenges, and takes the token as key."""

        async def opened(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["server"] == (_HOST, self.port):
                headers = dict(scope["headers"])
                if (challenge := headers.get(_CHALLENGE_HEADER.encode())) is not None:
                    proof = _PROOF_HEADER.encode(), self.proof(challenge).encode()
                    await send({"type": "http.response.start", "status": 204, "headers": [proof]})
                    await send({"type": "http.response.body"})
                    return
                if hmac.compare_digest(
                    headers.get(_TOKEN_HEADER.encode(), b""), self.token.encode()
                ):
                    scope = {**scope, "server": (_HOST, None)}  # `Access` then asks for no key
            await app(scope, receive, send)

        return opened


@contextmanager
def open_ask_port(model: str) -> Iterator[tuple[AskPort, socket.socket] | None]:
    """Context manager: the port by which `ask` of the same user finds the server; its socket.

    None if there can be none, or if another server with this model has one.
    """
    path, opened = paths.server_port_file(model), None
    if (other := connect_to_user_server(model)) is not None:
        other[0].close()
    else:
        with suppress(OSError):
            opened = _bind_port(path)
    if opened is None:
        yield None
        return
    try:
        with opened[1]:
            yield opened
    finally:
        with suppress(OSError):
            if _read_port_file(path) == opened[0]:
                path.unlink()


def connect_to_user_server(model: str) -> tuple[HTTPConnection, dict[str, str]] | None:
    """An open connection to this user's server for the model, and headers that give access.

    None if there is no such server.
    """
    own = _read_port_file(paths.server_port_file(model))
    if own is None:
        return None
    connection, challenge = (
        HTTPConnection(_HOST, own.port, timeout=_PROOF_TIMEOUT_S),
        secrets.token_hex(),
    )
    try:
        connection.request("GET", "/", headers={_CHALLENGE_HEADER: challenge})
        response = connection.getresponse()
        given = response.headers.get(_PROOF_HEADER, "").encode()
        if connection.sock and hmac.compare_digest(given, own.proof(challenge.encode()).encode()):
            response.read()  # not what another program sends without end
            connection.sock.settimeout(None)
            connection.auto_open = 0  # a later connection might reach another program
            return connection, {_TOKEN_HEADER: own.token}
    except (OSError, HTTPException):
        pass
    connection.close()
    return None


def _bind_port(path: Path) -> tuple[AskPort, socket.socket]:
    """Bind a free port, and write it to the file `path` with a new token; OSError if this fails."""
    listener = socket.socket()
    try:
        listener.bind((_HOST, 0))
        own = AskPort(listener.getsockname()[1], secrets.token_hex())
        paths.make_private_dir(path.parent)
        paths.write_private(path, f"{own.port} {own.token}", replaces=True)
    except OSError:
        listener.close()
        raise
    return own, listener


def _read_port_file(path: Path) -> AskPort | None:
    try:
        port, token = path.read_text("ascii").split()
        if paths.find_changeable_by_others(path) is not None:  # it may lead to a server of theirs
            return None
        return AskPort(int(port), token)
    except (OSError, ValueError):
        return None
