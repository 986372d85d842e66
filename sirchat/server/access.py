"""Access control: checks host, origin, API key and size of each request.

A web page can make the browser send requests, even under a host name of its own that resolves to
this machine (DNS rebinding). So on a loopback address, the `Host` header must name this machine.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sirchat.errors import format_value
from sirchat.server.fields import MAX_BODY_BYTES, RequestError

# `host.docker.internal` is how containers call the machine on which they run.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "host.docker.internal")

_BODY_SECONDS = 300.0  # in which the whole body of a request must come


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address, which only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def read_body(request: Request) -> bytes:
    """Read a request's body; raises RequestError if it is too large or comes too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        why = f"the request did not come within {_BODY_SECONDS:g} seconds"
        raise RequestError(why, status=408, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise RequestError("the client closed the connection", status=499) from None
    return bytes(body)


async def show_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message, headers = f"{request.method} {request.url.path}: {error.detail}", error.headers
        error = RequestError(message, status=error.status_code, headers=dict(headers or {}))
    if not isinstance(error, RequestError):
        error = RequestError(f"the request failed: {type(error).__name__}", status=500)
    return JSONResponse(error.body_for(request.url.path), error.status, error.headers)


@dataclass(frozen=True)
class Access:
    """ASGI middleware that refuses requests of clients that may not use the server `app`.

    `host` is the name or address where the server listens. `key` is the API key, or None if
    requests need none. Web pages of the `origins` may use the server, too.
    """

    app: ASGIApp
    host: str
    key: str | None
    origins: Sequence[str] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                needs_key = scope["path"] not in ("/", "/health")
                self._check(Headers(scope=scope), needs_key=needs_key)
            except RequestError as error:
                answer = await show_error(Request(scope), error)
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers, *, needs_key: bool) -> None:
        asked = _host_of(f"//{headers.get('host', '')}")
        allowed = {*_LOCAL_HOSTS, self.host.lower()}
        if is_loopback(self.host):
            if asked not in allowed:
                raise RequestError(
                    f"the host of the request, {format_value(asked)}, is not this machine; "
                    "to serve others: sirchat serve --host 0.0.0.0 --api-key KEY",
                    status=403,
                )
        elif asked is not None:
            allowed.add(asked)  # the server's own page, under the name by which others reach it
        origins = (origin for origin in headers.getlist("origin") if origin not in self.origins)
        if any(_host_of(origin) not in allowed for origin in origins):
            raise RequestError(
                "requests from other web sites are refused; to allow one: sirchat serve --cors URL",
                status=403,
            )
        if self.key is not None and needs_key and not self._has_key(headers):
            raise RequestError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size[:20]) > MAX_BODY_BYTES:
            raise _too_large()

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent_key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        right_key = (self.key or "").encode(errors="surrogateescape").strip()
        # Starlette reads a header as Latin-1, in which some clients send it; most send UTF-8.
        sent_keys = [sent_key.encode(encoding).strip() for encoding in ("latin-1", "utf-8")]
        return any(hmac.compare_digest(sent, right_key) for sent in sent_keys)


def _host_of(url: str) -> str | None:
    """The host name in an origin's URL, without port and brackets; None if it is not valid."""
    with suppress(ValueError):  # of the port, too
        parts = urlsplit(url)
        if not set("@\\") & set(url) and parts[2:] == ("", "", "") and parts.port != 0:
            return parts.hostname
    return None


def _too_large() -> RequestError:
    mebibytes = MAX_BODY_BYTES // 2**20
    return RequestError(f"the request is too large; allowed: up to {mebibytes} MiB", status=413)
