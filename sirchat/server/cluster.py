"""Runs several servers, called replicas, with Ray Serve, on one machine or on many.

A hash of a conversation's name or beginning selects the replica for all its requests. A replica
that died is started again, and finds its conversations in a folder that all machines share.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.errors import UsageError
from sirchat.memory.archive import remove_stale_folders
from sirchat.models.load import load_model_of
from sirchat.models.new_thread import call_in_new_thread
from sirchat.paths import archives_dir, served_dir
from sirchat.server.access import read_body, show_error
from sirchat.server.app import ChatServer, chat_request, conversation_header
from sirchat.server.fields import RequestError, parse_json_object
from sirchat.server.pool import Limits

_SCOPE_KEYS = ("type", "http_version", "method", "scheme", "path", "query_string", "headers")
_MAX_REQUESTS = 100_000  # under way: the replica itself says how many may wait


class ClusterOptions(Limits):
    """What Ray reserves, and where replicas save; other fields are settings of sirchat."""

    model_config = ConfigDict(extra="allow")
    replicas: int = Field(2, ge=1, le=1000)
    cpus: float = Field(1, gt=0)
    gpus: float = Field(0, ge=0)
    folder: Path | None = None
    profile: str | None = None


class Replica:
    """One of the servers; no other replica uses its conversations, or its `folder`."""

    def __init__(self, profile: Profile, limits: Limits, folder: Path, key: str) -> None:
        self._server: ChatServer | None = None  # while the model is not loaded
        remove_stale_folders(archives_dir())  # removes archives of replicas that were killed
        model = call_in_new_thread(lambda: load_model_of(profile))
        self._server = ChatServer(model, profile, limits, folder=folder, host="0.0.0.0", key=key)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Answer a request, given by its ASGI scope and body; yields the ASGI messages."""
        assert self._server is not None
        messages, bodies = asyncio.Queue[Any](), iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:  # if the client leaves, its task is cancelled
            return next(bodies, None) or await asyncio.Future()

        running = asyncio.create_task(self._server.app(scope, receive, messages.put))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            running.cancel()

    def __del__(self) -> None:  # Ray calls it when it stops a replica
        if self._server is not None:
            self._server.replies.close()


class Router:
    """Sends each request to the replica that has its conversation, by Ray's handles of all."""

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        try:
            if "/sirchat/" in request.url.path:
                raise RequestError("replicas do not show their conversations", status=404)
            body = await read_body(request)
            name, count = conversation_header(request), len(self._replicas)
            replica = self._replicas[replica_of(count, request.url.path, body, name)]
            scope = {key: request.scope[key] for key in _SCOPE_KEYS}
            messages = replica.options(stream=True).answer.remote(scope, body)
            try:
                start = await anext(messages)
            except Exception:  # whatever Ray raises
                problem = "the replica of this conversation is starting again; try again later"
                raise RequestError(problem, status=503, headers={"Retry-After": "5"}) from None
        except RequestError as error:
            return await show_error(request, error)
        pieces = (message.get("body", b"") async for message in messages)
        response = StreamingResponse(pieces, start["status"])
        response.raw_headers = start["headers"]
        return response


def replica_of(count: int, path: str, body: bytes, name: str = "") -> int:
    """Which of `count` replicas has a request's conversation, by its `name` or its beginning.

    With one replica more, a conversation stays or moves to the new one.
    """
    beginning: Any = None
    with suppress(RequestError):  # such as without a body; the replica answers with the same error
        chat = chat_request(f"/v1{path.removeprefix('/v1')}", parse_json_object(body))
        beginning = chat.sirchat.conversation or name or [chat.system, chat.turns[0]]
    key = json.dumps(beginning).encode()
    # rendezvous hashing (Thaler and Ravishankar 1998)
    return max(range(count), key=lambda number: sha256(key + number.to_bytes(2)).digest())


def app(settings: Mapping[str, Any]) -> Any:
    """The Ray Serve application for `serve run sirchat.server.cluster:app NAME=VALUE ...`.

    NAME is a field of `ClusterOptions` or a setting of sirchat; VALUE is a text.
    """
    options = ClusterOptions.model_validate(settings)
    if not (key := os.environ.get("SIRCHAT_API_KEY", "").strip()):
        raise UsageError("replicas need an API key", hint="set SIRCHAT_API_KEY")
    profile = resolve(options.profile, options.model_extra or {}, os.environ)
    from ray import serve

    deploy = partial(serve.deployment, max_ongoing_requests=_MAX_REQUESTS)
    actor = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    replica, folder = deploy(ray_actor_options=actor)(Replica), options.folder or served_dir()
    names = (f"replica-{number}" for number in range(options.replicas))
    places = [(name, folder.absolute() / name) for name in names]
    replicas = [replica.options(name=n).bind(profile, options, at, key) for n, at in places]
    return deploy(ray_actor_options={"num_cpus": 0})(Router).bind(*replicas)
