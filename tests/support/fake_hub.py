"""A web server that plays the few endpoints of the Hugging Face hub that a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by name, each with its files.

    Attributes:
        url: for HF_ENDPOINT.
        gated: repositories whose files are refused.
        refuses: status and message of all answers of the kind `refused`: `api` or `file`.
        stalls_after: bytes of a file's body after which the server sends no more; -1 for never.
        ends_after: bytes of a large file's body after which the connection is closed; -1 for never.
        sends: bytes that a large file is said to have in an answer, of its own and then zeros; -1
            for as many as it has.
        asked: method, path and `Range` of each request for a file.
    """

    repositories: Mapping[str, Mapping[str, bytes]]
    url: str = ""
    gated: set[str] = field(default_factory=set)
    refuses: tuple[int, str] = (0, "")
    refused: str = ""
    stalls_after: int = -1
    ends_after: int = -1
    sends: int = -1
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def ranges(self, file: str) -> list[str]:
        """The `Range` of each request for the body of this file."""
        return [bytes_ for how, name, bytes_ in self.asked if how == "GET" and name == file]


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Serve these repositories on this machine."""
    hub = FakeHub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        name, _, rest = path.removeprefix("api/models/").partition("/resolve/")
        if self.hub.refused == ("api" if path.startswith("api/models/") else "file"):
            status, message = self.hub.refuses
            self._send(status, b"", {"X-Error-Message": message})
            return
        if not path.startswith("api/models/"):
            self._file(name, rest.partition("/")[2])
            return
        files = self.hub.repositories.get(name)
        if files is None:
            self._refuse(404, "RepoNotFound")
            return
        siblings = [{"rfilename": one, "size": len(data)} for one, data in files.items()]
        about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def _file(self, name: str, file: str) -> None:
        wanted = self.headers.get("Range", "")
        self.hub.asked.append((self.command, file, wanted))
        data = self.hub.repositories.get(name, {}).get(file)
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif data is None:
            self._refuse(404, "EntryNotFound")
        else:
            start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0)
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if wanted:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if wanted else 200, data[start:], headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        if self.hub.sends >= 0 and self.command == "GET" and len(body) > 2**20:
            body = body[: self.hub.sends].ljust(self.hub.sends, b"\0")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        most = self.hub.stalls_after
        if 0 <= most < len(body):
            self.wfile.write(body[:most])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(60)
            self.close_connection = True
            return
        if 0 <= self.hub.ends_after < len(body) and len(body) > 2**20:
            body, self.close_connection = body[: self.hub.ends_after], True
        self.wfile.write(body)
