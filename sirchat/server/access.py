"""Access control: checks the host, the origin and the API key of each request.

A web page that the user visits can make the browser send requests to this server. The page can even
use its own host name, if that name resolves to this machine (DNS rebinding). So a server that
listens on a loopback address refuses every request whose `Host` header does not name this machine.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sirchat.server.requests import MOST_BYTES, RequestError

_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address, which only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Access:
    """ASGI middleware that refuses requests of clients that may not use the server.

    Attributes:
        app: the ASGI application that answers the requests that are not refused.
        host: the name or address where the server listens.
        key: the API key that requests must have; None if no key is needed.
    """

    app: ASGIApp
    host: str
    key: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request; answer a refused request with an error, pass any other to `app`."""
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), needs_key=_needs_key(scope))
            except RequestError as error:
                answer = JSONResponse(error.body, error.status, error.headers)
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers, *, needs_key: bool) -> None:
        asked, origin = _host_of(f"//{headers.get('host', '')}"), headers.get("origin")
        names = (*_NAMES, self.host.lower())
        if is_loopback(self.host) and asked not in names:
            raise RequestError("the host of the request is not this machine", status=403)
        if origin is not None and _host_of(origin) not in (*names, *_asked_from_afar(asked, self)):
            raise RequestError("requests from other web sites are refused", status=403)
        if self.key is not None and needs_key and not self._has_key(headers):
            raise RequestError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size[:20]) > MOST_BYTES:
            raise too_large()

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given, right = key.strip().encode("latin-1"), (self.key or "").strip().encode()
        return scheme.lower() == "bearer" and hmac.compare_digest(given, right)


def _needs_key(scope: Scope) -> bool:
    """Whether a request, given by its ASGI scope, needs the API key.

    The paths `/` and `/health` need no key, because their responses show nothing of a conversation.
    A request through the Unix socket needs no key, because only the user who runs the server can
    open the socket. ASGI gives such a request no port.
    """
    _, port = scope.get("server") or ("", 0)
    return scope["path"] not in ("/", "/health") and port is not None


def _asked_from_afar(asked: str | None, access: Access) -> Sequence[str | None]:
    """The host whose web pages may also send this request, as a tuple of at most one item.

    `asked` is the host in the request's `Host` header. If other machines can reach the server, the
    result is `(asked,)`, so that the server's own web page can send requests. Otherwise, or if
    `asked` is None, the result is empty.
    """
    return () if is_loopback(access.host) or asked is None else (asked,)


def _host_of(url: str) -> str | None:
    """The host name in a URL, without port and brackets; None if the URL has no valid host."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def too_large() -> RequestError:
    """Make the RequestError (status 413) for a request body of more than `MOST_BYTES` bytes."""
    most = MOST_BYTES // 2**20
    return RequestError(f"the request is too large; allowed: up to {most} MiB", status=413)
