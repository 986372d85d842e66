"""Servers for tests, asked without a network or at a port, and the slow way to the same reply."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from chatting import answer, session, tiny
from sirchat.chat.model_defaults import SAMPLING_PARAMETERS
from sirchat.config.profile import Profile
from sirchat.models.model import LoadedModel
from sirchat.server.app import ChatServer
from sirchat.server.conversation import History
from sirchat.server.pool import Limits
from sirchat.server.replies import ReplyOptions
from sirchat.server.reply_thread import SentPart, WaitingReply
from warm_python import warm_python

Message = dict[str, str]
# Settings whose defaults depend on the model.
_MODEL_DEFAULTS = (*SAMPLING_PARAMETERS, "recall")
URL, CHAT = "http://127.0.0.1:8080", "/v1/chat/completions"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(reply: Any) -> str:
    """The text of a reply."""
    text: str = reply["choices"][0]["message"]["content"]
    return text


def cached(reply: Any) -> int:
    """How many tokens were not read again for a reply."""
    usage = reply["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    count: int = details["cached_tokens"]
    return count


def held_text(server: Served, reply: Any) -> str:
    """The text of all tokens that are held in the conversation of a reply."""
    shown = server.client.get(f"/v1/sirchat/sessions/{reply['sirchat']['id']}").json()
    return "".join(row["text"] for row in shown["rows"])


def refusal(response: Any, status: int = 400) -> Any:
    """The error in a response, which must have this status and the shape of OpenAI's errors."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


class Served:
    """A running server, and its only client."""

    def __init__(self, server: ChatServer) -> None:
        self.server = server
        self.client = TestClient(server.app, base_url=URL, raise_server_exceptions=False)

    def post(self, messages: Sequence[Message], **fields: Any) -> Any:
        """The response to a request."""
        body = {"model": "tiny", "messages": list(messages), **fields}
        return self.client.post(CHAT, json=body)

    def ask(self, messages: Sequence[Message], **fields: Any) -> Any:
        """The JSON of the response, which must be a reply."""
        return self.send(CHAT, **{"model": "tiny", "messages": list(messages), **fields})

    def send(self, path: str, **body: Any) -> Any:
        """The JSON of the response to a body that is posted to `path`; it must not be an error."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def reply(self, messages: Sequence[Message], **fields: Any) -> str:
        """The text of the reply."""
        return said(self.ask(messages, **fields))

    def chunks(self, messages: Sequence[Message], **fields: Any) -> list[Any]:
        """The JSON of each event of a stream, without the last line, which must be [DONE]."""
        response = self.post(messages, stream=True, **fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        told = [one for one in events if not one.startswith(":")]  # a comment: it took long
        return [json.loads(one.removeprefix("data: ")) for one in told]


@contextmanager
def served(
    model: LoadedModel | None = None,
    *,
    host: str = "127.0.0.1",
    key: str | None = None,
    folder: Path | None = None,
    name: str = "tiny",
    cors: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Served]:
    """Context manager: a server with some settings changed; it saves in `folder`, if given.

    `name` is the setting `model`; `settings` may have fields of `Limits`, too. What they lack is as
    built in, also for a model with other defaults.
    """
    limits = {field: settings.pop(field) for field in Limits.model_fields if field in settings}
    built_in = {name: getattr(Profile(), name) for name in _MODEL_DEFAULTS}
    profile = Profile(model=name, save=folder is not None, **built_in | settings)
    server = ChatServer(
        model or tiny(),
        profile,
        Limits(**{"queue": 16, **limits}),
        folder=folder or Path(),
        host=host,
        key=key,
        cors=cors,
    )
    try:
        yield Served(server)
    finally:
        server.replies.close()


def told(messages: Sequence[Message], of: Callable[[], LoadedModel] = tiny, **settings: Any) -> str:
    """The reply of a new session that reads all messages, with everything held."""
    turns = tuple((message["role"], message["content"]) for message in messages)
    return _told(turns, of, tuple(settings.items()))


@cache
def _told(
    messages: tuple[tuple[str, str], ...],
    of: Callable[[], LoadedModel],
    settings: tuple[tuple[str, Any], ...],
) -> str:
    system = next((text for role, text in messages if role == "system"), None)
    one = session(of(), policy="full", system=system, **dict(settings))
    *before, (_, question) = [(role, text) for role, text in messages if role != "system"]
    for role, text in before:
        list(one.read_user(text) if role == "user" else one.read_reply(text))
    return answer(list(one.ask(question)))


def server_of_module(model: Callable[[], LoadedModel] = tiny, **settings: Any) -> Any:
    """A fixture `server`: one server for all tests of a module."""

    @pytest.fixture(scope="module", name="server")
    def server() -> Iterator[Served]:
        with served(model(), **settings) as one:
            yield one

    return server


def waiting(
    text: str,
    send: Callable[[SentPart], None],
    most: int | None = None,
    client: str | None = None,
    **options: Any,
) -> WaitingReply:
    """A reply of at most so many tokens to a first message, for the thread of all replies."""
    settings = {} if most is None else {"max_new_tokens": most}
    history = History.of(None, [("user", text)])
    return WaitingReply(history, ReplyOptions(settings, **options), send, client)


@contextmanager
def listening(one: Served) -> Iterator[str]:
    """Context manager: the server listens at a free port; yields its address."""
    running = uvicorn.Server(uvicorn.Config(one.server.app, port=0, log_level="critical"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:  # else a test that fails would never end
        running.should_exit = True
        thread.join()


@contextmanager
def serve_program(home: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Context manager: `sirchat serve` at a free port; yields the process, and its address."""
    with subprocess.Popen(
        [*warm_python(), "-m", "sirchat", "serve", "--port", "0", *flags],
        env=os.environ | {"SIRCHAT_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("sirchat serves "), process.stderr.read()
        yield process, line.split()[4]
