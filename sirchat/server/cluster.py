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
from sirchat.server.app import ChatServer, chat_request
from sirchat.server.fields import RequestError, parse_json_object
from sirchat.server.pool import Limits
from sirchat.server.requests import MAX_NAME_CHARS

_SCOPE_KEYS = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string")
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
        remove_stale_folders(archives_dir())  # removes archives of replicas that were killed
        model = call_in_new_thread(lambda: load_model_of(profile))
        self._server = ChatServer(model, profile, limits, folder=folder, host="0.0.0.0", key=key)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Answer a request, given by its ASGI scope and body; yields the ASGI messages."""
        messages, bodies = asyncio.Queue[Any](), [body]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await asyncio.Future()  # if the client leaves, this task is cancelled

        running = asyncio.create_task(self._server.app(scope, receive, messages.put))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            running.cancel()

    def end(self) -> None:
        """End all replies, and save the conversations."""
        with suppress(AttributeError):  # the model could not be loaded
            self._server.replies.end()
            self._server.replies.join()

    __del__ = end  # Ray calls it when it stops a replica


class Router:
    """Sends each request to the replica that has its conversation, by Ray's handles of all."""

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        path, name = request.url.path, request.headers.get("X-Sirchat-Conversation", "")
        try:
            if "/sirchat/" in path:
                raise RequestError("replicas do not show their conversations", status=404)
            body = await read_body(request)
            key = conversation_key(path, body, name[:MAX_NAME_CHARS])
            replica = self._replicas[replica_of(key, len(self._replicas))].options(stream=True)
            scope = {one: request.scope[one] for one in _SCOPE_KEYS if one in request.scope}
            scope |= {"root_path": "", "headers": [*map(tuple, request.scope["headers"])]}
            messages = replica.answer.remote(scope, body)
            try:
                start = await anext(messages)
            except Exception:  # whatever Ray raises
                problem = "the replica of this conversation is starting again; try again later"
                raise RequestError(problem, status=503, headers={"Retry-After": "5"}) from None
        except RequestError as error:
            return await show_error(request, error)
        pieces = (message.get("body", b"") async for message in messages)
        response = StreamingResponse(pieces, start["status"])
        response.raw_headers = [*map(tuple, start["headers"])]
        return response


def conversation_key(path: str, body: bytes, name: str = "") -> bytes:
    """Hash the name of a request's conversation, or else its system prompt and first message."""
    beginning: Any = None
    with suppress(RequestError):  # such as without a body; the replica answers with the same error
        chat = chat_request(f"/v1{path.removeprefix('/v1')}", parse_json_object(body))
        beginning = chat.sirchat.conversation or name or [chat.system, chat.turns[0]]
    return sha256(json.dumps(beginning).encode()).digest()


def replica_of(key: bytes, count: int) -> int:
    """The replica, of `count`, of a key; with one more, a key stays or moves to the new one."""
    # rendezvous hashing (Thaler and Ravishankar 1998)
    return max(range(count), key=lambda number: sha256(key + number.to_bytes(2)).digest())


def app(settings: Mapping[str, Any]) -> Any:
    """The Ray Serve application for `serve run sirchat.server.cluster:app NAME=VALUE ...`.

    NAME is a field of `ClusterOptions` or a setting of sirchat; VALUE is a text.
    """
    options = ClusterOptions.model_validate(settings)
    key = os.environ.get("SIRCHAT_API_KEY", "").strip()
    if not key:
        raise UsageError("replicas need an API key", hint="set SIRCHAT_API_KEY")
    profile = resolve(options.profile, options.model_extra or {}, os.environ)
    from ray import serve

    folder, deploy = (options.folder or served_dir()).absolute(), serve.deployment
    actor = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    deployed = deploy(ray_actor_options=actor, max_ongoing_requests=_MAX_REQUESTS)(Replica)
    names = (f"replica-{number}" for number in range(options.replicas))
    replicas = [deployed.options(name=n).bind(profile, options, folder / n, key) for n in names]
    routers = deploy(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_MAX_REQUESTS)
    return routers(Router).bind(*replicas)
