"""The port at which `sirchat ask` finds a running server of the same user.

The server writes the port and a token to a file that only its user can read. If the server is
killed, the file stays, and another program may take the port. So the server must first prove, by
its answer to a challenge, that it knows the token; the token itself is not sent.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from sirchat import paths

_HOST = "127.0.0.1"
_PROOF_TIMEOUT_S = 2.0  # within which a server must prove itself
_TOKEN_HEADER, _CHALLENGE_HEADER = "sirchat-token", "sirchat-challenge"
_PROOF_HEADER = "sirchat-proof"


class AskPort(NamedTuple):
    """The port, and the token that only programs of the server's user can read."""

    port: int
    token: str

    def proof(self, challenge: bytes) -> str:
        """The answer (hexadecimal HMAC) to a challenge, which proves knowledge of the token."""
        return hmac.new(self.token.encode(), challenge, "sha256").hexdigest()

    def with_access(self, app: Any) -> Any:
        """Wrap an ASGI app: it answers challenges, and accepts the token as API key."""

        async def app_with_access(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                headers = dict(scope["headers"])
                if (challenge := headers.get(_CHALLENGE_HEADER.encode())) is not None:
                    proof = _PROOF_HEADER.encode(), self.proof(challenge).encode()
                    await send({"type": "http.response.start", "status": 204, "headers": [proof]})
                    await send({"type": "http.response.body"})
                    return
                token = headers.get(_TOKEN_HEADER.encode(), b"")
                if hmac.compare_digest(token, self.token.encode()):
                    scope = {**scope, "server": (_HOST, None)}  # `Access` then asks for no key
            await app(scope, receive, send)

        return app_with_access


@contextmanager
def tell_ask_port(model: str, port: int) -> Iterator[AskPort | None]:
    """Context manager: `ask` finds a server at this port; yields the port and its token.

    Yields None if that fails, or if another server with this model is already found.
    """
    path = paths.server_port_file(model)
    if (other := connect_to_user_server(model)) is not None:
        other[0].close()
        yield None
        return
    own = AskPort(port, secrets.token_hex())
    try:
        paths.make_private_dir(path.parent)
        paths.write_private(path, f"{port} {own.token}", replaces=True)
    except OSError:
        yield None
        return
    try:
        yield own
    finally:
        with suppress(OSError):
            if _read_port_file(path) == own:
                path.unlink()


def connect_to_user_server(model: str) -> tuple[HTTPConnection, dict[str, str]] | None:
    """An open connection to this user's server for the model, with headers that give access."""
    port = _read_port_file(paths.server_port_file(model))
    if port is None:
        return None
    connection = HTTPConnection(_HOST, port.port, timeout=_PROOF_TIMEOUT_S)
    challenge = secrets.token_hex()
    try:
        connection.request("GET", "/", headers={_CHALLENGE_HEADER: challenge})
        response = connection.getresponse()
        answer = response.headers.get(_PROOF_HEADER, "").encode()
        expected = port.proof(challenge.encode()).encode()
        if connection.sock and hmac.compare_digest(answer, expected):
            response.read()  # not what another program sends without end
            connection.sock.settimeout(None)
            connection.auto_open = 0  # a later connection might reach another program
            return connection, {_TOKEN_HEADER: port.token}
    except (OSError, HTTPException):
        pass
    connection.close()
    return None


def _read_port_file(path: Path) -> AskPort | None:
    try:
        port, token = path.read_text("ascii").split()
        if paths.find_changeable_by_others(path) is not None:  # it may lead to a server of theirs
            return None
        return AskPort(int(port), token)
    except (OSError, ValueError):
        return None
