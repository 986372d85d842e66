"""Programs that speak HTTP wrongly, slowly or not at all: others are answered as before.

`SIRCHAT_ATTACK=1000` opens as many connections.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.types import Message

from attacking import MANY
from serving import CHAT
from sirchat.server import access
from sirchat.server.access import read_body
from sirchat.server.fields import RequestError
from warm_python import warm_python

_BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "seed": 1}).encode()
_FILES = 128  # that the server may have open, so that few connections are too many
_SECONDS = 60.0
_LENGTHS = {"content-length", "transfer-encoding"}

Address = tuple[str, int]


def request(*headers: str, body: bytes = _BODY, line: str = f"POST {CHAT} HTTP/1.1") -> bytes:
    """A request as it is sent; its length and the host are told, unless headers say others."""
    told = {one.partition(":")[0].lower() for one in headers}
    own = [] if "host" in told else ["Host: localhost"]
    own += [f"Content-Length: {len(body)}"] * (not told & _LENGTHS)
    return "\r\n".join([line, *own, *headers, "", ""]).encode("latin-1") + body


_CLOSE, _CHUNKED = "Connection: close", "Transfer-Encoding: chunked"
_CHUNK = b"%x\r\n%s\r\n" % (len(_BODY), _BODY)
# What is sent, and the status of the answer.
ODD: list[tuple[bytes, int]] = [
    (request(_CLOSE, line=f"POST {CHAT} HTTP/1.0"), 200),
    (request("Host: ", line=f"POST {CHAT} HTTP/1.0"), 403),
    (f"POST {CHAT} HTTP/1.1\r\n\r\n".encode(), 400),
    (b"GET /\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 403),
    (request("Host: localhost", "Host: evil.example"), 400),
    (request(_CLOSE, "Origin: http://localhost", "Origin: http://evil.example"), 403),
    (request(_CLOSE, "Content-Length: 10"), 400),
    (request("Content-Length: 10", "Content-Length: 11"), 400),
    (request("Content-Length: -1"), 400),
    (request("Content-Length: 99999999999999999999999"), 400),
    (request(_CLOSE, "Content-Length: 99999999999"), 413),
    (request(_CLOSE, _CHUNKED, body=_CHUNK + b"0\r\n\r\n"), 200),
    (request(_CHUNKED, body=b"zz\r\nno\r\n"), 400),
    (request(_CHUNKED, body=b"-5\r\nno\r\n"), 400),
    (request(_CLOSE, _CHUNKED, body=b"1000000\r\n%s\r\n" % (b" " * 2**24) * 2), 413),
    (request("Transfer-Encoding: gzip"), 400),
    (request(_CLOSE, "Content-Encoding: gzip", body=gzip.compress(b" " * 2 * 10**7)), 400),
    (request(_CLOSE, "Authorization: \xff\xfe"), 200),
    (request(_CLOSE, "X-Sirchat-Conversation: \xff\xe9"), 200),
    (request(_CLOSE, "X: " + "a" * 10**6), 400),
    (request(_CLOSE, *(f"X-{number}: a" for number in range(20_000))), 400),
    (request(_CLOSE, line="GET /v1/models/%ff%00%1b[2J HTTP/1.1", body=b""), 404),
    (request(_CLOSE, line="GET /v1/sirchat/sessions/%00/facts?words=%ff%00 HTTP/1.1"), 404),
    (request(_CLOSE, line=f"GET /{'a' * 10**4} HTTP/1.1", body=b""), 404),
    (request(_CLOSE, line="GET //[x HTTP/1.1", body=b""), 404),
    (request(_CLOSE, line="POST http://[::1/v1 HTTP/1.1"), 404),
    (request(_CLOSE, line=f"TRACE {CHAT} HTTP/1.1"), 405),
    (request(_CLOSE, "Connection: upgrade", "Upgrade: websocket"), 200),
]


def send(address: Address, data: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer to what is sent."""
    with socket.create_connection(address, _SECONDS) as one:
        with suppress(ConnectionError):  # who is refused need not be read to the end
            one.sendall(data)
        said = b""
        with suppress(ConnectionError):
            while part := one.recv(65536):
                said += part
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def reply(address: Address) -> str:
    status, body = send(address, request(_CLOSE))
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return text


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """A server that may have few files open, and its address."""
    program = tmp_path / "serve.py"
    program.write_text(
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({_FILES},) * 2)\n"
        "sys.argv = 'sirchat serve -m tiny --no-save --port 0'.split()\n"
        "runpy.run_module('sirchat', run_name='__main__', alter_sys=True)\n"
    )
    with subprocess.Popen(
        [*warm_python(), str(program)],
        env=os.environ | {"SIRCHAT_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            place = urlsplit(process.stdout.readline().split()[4])
            yield process, (str(place.hostname), int(place.port or 0))
        finally:
            process.kill()


def test_a_body_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    monkeypatch.setattr(access, "_BODY_SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"did not come within 0.05 seconds") as refused:
        asyncio.run(asyncio.wait_for(read_body(Request({"type": "http"}, receive)), 5))
    assert (refused.value.status, refused.value.headers) == (408, {"Connection": "close"})


def test_who_speaks_http_wrongly_slowly_or_not_at_all_keeps_nobody_waiting(
    server: tuple[subprocess.Popen[str], Address],
) -> None:
    (process, address), random = server, Random(1)
    first = reply(address)
    for data, status in ODD:
        assert send(address, data)[0] == status, data[:200]
    begun = [b"", request()[:40], request("Content-Length: 9999999", body=b" " * 99)]
    with ExitStack() as stack:
        for number in range(MANY or 2 * _FILES):
            idle = stack.enter_context(socket.create_connection(address, _SECONDS))
            with suppress(ConnectionError):
                idle.sendall(begun[number % 3])
        assert reply(address) == first
    whole = request(body=_BODY[:-1] + b', "stream": true}')
    for number in range(MANY or 30):
        with socket.create_connection(address, _SECONDS) as one, suppress(ConnectionError):
            one.sendall(whole if number % 2 else whole[: random.randrange(len(whole))])
            if number % 4 == 1:
                one.recv(random.choice((1, 100, 1000)))
    with socket.create_connection(address, _SECONDS) as one:
        one.sendall(request() * 19 + request(_CLOSE))
        said = b"".join(iter(lambda: one.recv(65536), b""))
    assert said.count(b"HTTP/1.1 200 OK") == 20
    assert reply(address) == first
    process.terminate()
    log = process.communicate()[1]
    assert not [line for line in log.splitlines() if "Traceback" in line or "ERROR" in line], log
