"""A client of `sirchat serve` for `sirchat ask`; starts at once, as it imports nothing slow."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sirchat.cli.ask_port import connect_to_user_server
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError, UsageError, format_value
from sirchat.memory.policies import is_path
from sirchat.text.json_schema import load_schema

if TYPE_CHECKING:
    from sirchat.ui.screen import Screen


_LONG_BODY_CHARS = 16_384  # characters: reading a text of this length takes a second or more
_MAX_EVENT_BYTES = 2**20  # bytes: most of an event
_NOT_SIRCHAT = "the server's answer is not one of sirchat serve"


def ask_server(
    server: str, profile: Profile, text: str, screen: "Screen", *, holds_all: bool, source: int
) -> bool:
    """Print a server's reply to `text`, whose first `source` characters it asks about.

    `server` is a URL, or `auto` for this user's server: False if that would not reply as `ask`
    itself does. Raises SirchatError if the URL refuses. Ctrl-C ends the reply.
    """
    if server != "auto":
        connection, headers = _connection(server), dict[str, str]()
    elif is_path(profile.policy) or (found := connect_to_user_server(profile.model)) is None:
        return False
    else:
        connection, headers = found
    headers = {"Content-Type": "application/json", **headers}
    if key := os.environ.get("SIRCHAT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    body = _request_body(profile, text, holds_all=holds_all, source=source)
    bar, problem = ExitStack(), ""
    try:
        try:
            if len(body) > _LONG_BODY_CHARS:
                from sirchat.ui.status import loading_bar

                if report := bar.enter_context(loading_bar(screen, profile.model)):
                    report(f"the server reads {len(text):,} characters", 0, None)
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                problem = f"refuses: {_refusal(response)}"
        except (OSError, HTTPException) as error:
            problem = f"can't be asked: {error}"
        if not problem:
            _print_reply(_events(response), screen, bar)
        elif server != "auto":
            raise SirchatError(f"the server at {format_value(server)} {problem}")
        return not problem
    finally:
        bar.close()
        connection.close()  # the server then ends the reply


def _request_body(profile: Profile, text: str, *, holds_all: bool, source: int) -> str:
    settings = profile.model_dump(exclude_unset=True, exclude={"json_schema"})
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "sirchat_ask": {"settings": settings, "holds_all": holds_all, "source": source},
    }
    if (schema := load_schema(profile.json_schema)) is not None:
        json_schema = {"name": "reply", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return json.dumps(fields)


def _connection(server: str) -> HTTPConnection:
    classes: dict[str, type[HTTPConnection]] = {"http": HTTPConnection, "https": HTTPSConnection}
    with suppress(ValueError, HTTPException):  # brackets that do not close, a port that is none
        parts = urlsplit(server)
        if parts.hostname and parts.scheme in classes:
            return classes[parts.scheme](parts.netloc)
    raise UsageError(
        f"--server can't be {format_value(server)}; allowed: auto, off, or a URL",
        hint="such as http://127.0.0.1:8080",
    )


def _refusal(response: HTTPResponse) -> str:
    try:
        return str(json.loads(response.read(65536))["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return f"status {response.status}"


def _events(response: HTTPResponse) -> Iterator[Any]:
    """Yield the JSON of each server-sent event; raises SirchatError if the stream breaks off."""
    with suppress(OSError, HTTPException, ValueError, RecursionError):
        while line := response.readline(_MAX_EVENT_BYTES):
            if len(line) == _MAX_EVENT_BYTES:  # it may be endless
                raise SirchatError(_NOT_SIRCHAT)
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    raise SirchatError("the server ended before the reply was complete")


def _print_reply(events: Iterator[Any], screen: "Screen", bar: ExitStack) -> None:
    try:
        for event in events:
            bar.close()
            if "error" in event:
                raise SirchatError(event["error"]["message"])
            screen.stream(event["choices"][0]["delta"].get("content") or "")
            if "sirchat" in event:  # the reply is complete
                screen.line()
                screen.quote(event["sirchat"].get("quote", ""))
                for note in event["sirchat"].get("notes", ()):
                    screen.note(note)
    except (LookupError, TypeError, AttributeError):
        raise SirchatError(_NOT_SIRCHAT) from None
    except KeyboardInterrupt:
        screen.line()
        raise
