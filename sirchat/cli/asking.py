"""Runs `sirchat ask` through a running server, which has loaded the model: client and server side.

The client imports no heavy libraries such as torch, so that the reply begins at once.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sirchat.config.profile import Profile
from sirchat.errors import SirchatError, UsageError, format_value
from sirchat.memory.policies import is_path
from sirchat.paths import server_socket
from sirchat.ui.interrupt import Interrupt

if TYPE_CHECKING:
    from sirchat.chat.events import Event
    from sirchat.chat.session import Interrupted
    from sirchat.models.model import LoadedModel
    from sirchat.server.asking import AskedQuestion
    from sirchat.ui.screen import Screen

_ENDPOINT = "/v1/sirchat/ask"
_SECONDS = 2.0  # within which a server must accept a connection


class _SocketConnection(HTTPConnection):
    """An HTTP connection through a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(str(self._path))
        self.sock.settimeout(None)


def ask_server(
    server: str, profile: Profile, text: str, screen: "Screen", *, is_piped: bool, as_json: bool
) -> bool:
    """Let a server answer the question `text`, and print what the server sends.

    `server` is a URL, or `auto` for the server that this user runs with the same model. Returns
    True if a server has answered. With `auto`, returns False if there is no such server, or if the
    server refuses, for example because its model has other settings. Raises SirchatError if the
    server at a URL refuses, and KeyboardInterrupt after Ctrl-C has ended the reply.
    """
    connect = connection_to(server, profile)
    if connect is None or (server == "auto" and is_path(profile.policy)):
        return False
    question = {
        "text": text,
        "is_piped": is_piped,
        "as_json": as_json,
        "settings": profile.model_dump(exclude_unset=True),
    }
    connection = connect()
    try:
        connection.request("POST", _ENDPOINT, json.dumps(question), headers())
        response = connection.getresponse()
        why = "" if response.status == 200 else f"refuses: {why_refused(response)}"
    except (OSError, HTTPException) as error:
        why = f"can't be asked: {error}"
    if why:
        connection.close()
        if server == "auto":
            return False
        raise SirchatError(f"the server at {format_value(server)} {why}")
    stopping = _Stopping(connect)
    try:
        with stopping:
            _print(_answers(response), screen, stopping)
    except SirchatError:
        if not stopping():
            raise
    finally:
        connection.close()
    if stopping():
        raise KeyboardInterrupt
    return True


def connection_to(server: str, profile: Profile) -> Callable[[], HTTPConnection] | None:
    """A function that makes a connection to the server.

    `server` is a URL, or `auto` for the server that this user runs with the profile's model. None
    if `server` is `auto` and no such server runs. Raises UsageError for any other text.
    """
    if server == "auto":
        path = server_socket(profile.model)
        return (lambda: _SocketConnection(path)) if path.exists() else None
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--server can't be {format_value(server)}; allowed: auto, off, or a URL",
            hint="such as http://127.0.0.1:8080",
        )
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return lambda: kind(parts.netloc)


def headers() -> dict[str, str]:
    """The HTTP headers of a request; the API key comes from the variable `SIRCHAT_API_KEY`."""
    key = os.environ.get("SIRCHAT_API_KEY")
    return {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


def why_refused(response: HTTPResponse) -> str:
    """The reason that a server's response gives for refusing a request, as text."""
    try:
        return str(json.loads(response.read(65536))["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status}"


class _Stopping(Interrupt):
    """Context manager: the first Ctrl-C asks the server to end the reply.

    The server then stops generating, and sends what remains of its output.
    """

    def __init__(self, connect: Callable[[], HTTPConnection]) -> None:
        super().__init__()
        self._connect = connect
        self.path = ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = not self()
        super()._on_signal(number, frame)
        if not self.path:
            raise KeyboardInterrupt
        if is_first:
            with suppress(OSError, HTTPException):
                connection = self._connect()
                connection.request("DELETE", self.path, headers=headers())
                connection.getresponse()
                connection.close()


def _answers(response: HTTPResponse) -> Iterator[Any]:
    """Yield the JSON value in each line of a server's response.

    When a reply is complete, the caller stops reading. So if the lines come to an end, the server
    has ended too early: SirchatError is raised.
    """
    with suppress(OSError, HTTPException, ValueError):
        yield from map(json.loads, response)
    raise SirchatError("the server ended before the reply was complete")


def _print(answers: Iterator[Any], screen: "Screen", stopping: _Stopping) -> None:
    """Print the items that a server sends, until the item `end`.

    Raises SirchatError for an item `error`.
    """
    stopping.path = f"{_ENDPOINT}/{next(answers)['id']}"
    for how, *what in chain.from_iterable(answers):
        match how:
            case "stream":
                screen.stream(what[0])
            case "line":
                screen.line(what[0])
            case "note":
                screen.note(what[0])
            case "json":
                screen.line(json.dumps(what[0]))
            case "error":
                error = SirchatError(what[0])
                error.exit_code = what[1]
                raise error
            case "end":
                return


class _Recorder:
    """Takes the place of a screen on the server, and records what would be printed."""

    def __init__(self) -> None:
        self._printed: list[list[Any]] = []

    def stream(self, text: str) -> None:
        self._printed.append(["stream", text])

    def line(self, text: str = "") -> None:
        self._printed.append(["line", text])

    def note(self, text: str) -> None:
        self._printed.append(["note", text])

    def json(self, event: "Event") -> None:
        from sirchat.chat.events import to_json

        if event.kind:
            self._printed.append(["json", to_json(event)])

    def fail(self, error: SirchatError) -> None:
        self._printed.append(["error", str(error), error.exit_code])

    def take(self) -> list[list[Any]]:
        """Return the items recorded since the last call, such as `["line", "Hello"]`."""
        printed, self._printed = self._printed, []
        return printed


def answer_question(
    model: "LoadedModel", question: "AskedQuestion", interrupted: "Interrupted"
) -> Iterator[list[list[Any]]]:
    """Answer a question on the server, in a new session; yields lists of items to print.

    An item is what the client prints, such as `["line", "Hello"]`. `interrupted` is a function that
    returns whether to stop the reply.
    """
    from sirchat.chat.model_defaults import with_model_defaults
    from sirchat.chat.session import Session
    from sirchat.cli.chat import hold_all
    from sirchat.ui.replay import reply_steps

    profile, recorder = question.profile, _Recorder()
    try:
        session = Session(model, with_model_defaults(profile, model))
        if question.is_piped and "budget" not in profile.model_fields_set:
            hold_all(session, question.text)
        screen: Any = recorder
        text, as_json = question.text, question.as_json
        for _ in reply_steps(session, text, screen, interrupted, as_json=as_json):
            if printed := recorder.take():
                yield printed
    except SirchatError as error:
        recorder.fail(error)
    yield recorder.take()
