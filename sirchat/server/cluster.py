"""Runs several servers, called replicas, with Ray Serve, on one machine or on many.

Each conversation belongs to one replica. A hash of the conversation's beginning (system prompt and
first user message) selects this replica. So all requests of a conversation go to the same replica,
and no other replica has the conversation. When a replica dies, Ray restarts it, on another machine
if necessary. The restarted replica loads its conversations from a folder that all machines share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.errors import UsageError, format_value
from sirchat.memory.segments import sweep
from sirchat.models.devices import in_ending_thread
from sirchat.models.load import load_model_of
from sirchat.paths import archives_dir, served_dir
from sirchat.server.app import Limits, open_server, read_body, show_error
from sirchat.server.requests import RequestError

_SESSIONS = "/v1/sirchat/sessions"
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string")
_LOG = logging.getLogger(__name__)


class ClusterOptions(BaseModel):
    """The number of replicas (servers of a cluster), and the limits and resources of each.

    Attributes:
        replicas: number of replicas; each loads the model.
        conversations, saved, queue: limits of each replica; see `Limits`.
        cpus: number of CPUs that Ray reserves for each replica, and number of its threads.
        gpus: number of GPUs for each replica; it may be a fraction.
        folder: where conversations are saved; each replica has a folder of its own in it.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1, le=1000)
    conversations: int = Field(8, ge=1, le=1000)
    saved: int = Field(100, ge=1, le=10000)
    queue: int = Field(16, ge=0, le=10000)
    cpus: float = Field(1, gt=0)
    gpus: float = Field(0, ge=0)
    folder: Path | None = None


class Replica:
    """One of the servers of a cluster; it has the conversations that belong to it, and no others.

    Args:
        profile: the settings of the model and of each new conversation.
        limits: how many conversations and waiting requests this replica may have.
        folder: where this replica saves its conversations; no other replica uses this folder.
        key: the API key that requests must have.
    """

    def __init__(self, profile: Profile, limits: Limits, folder: Path, key: str) -> None:
        sweep(archives_dir())  # removes archives of replicas that were killed
        model = in_ending_thread(lambda: load_model_of(profile))
        self._server = open_server(model, profile, limits, folder=folder, host="0.0.0.0", key=key)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Pass a request to this replica's ASGI application; yields the response's ASGI messages.

        `scope` is the ASGI scope of the request, `body` is its whole body.
        """
        sent, asked = asyncio.Queue[dict[str, Any] | None](), [body]

        async def receive() -> dict[str, Any]:
            if asked:
                return {"type": "http.request", "body": asked.pop()}
            return await asyncio.Future()  # if the client leaves, this task is cancelled

        async def run() -> None:
            try:
                await self._server.app(scope, receive, sent.put)  # type: ignore[arg-type]
            except Exception as error:  # the application has sent the client an error
                _LOG.error("a request failed: %s", type(error).__name__)
            finally:
                sent.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            running.cancel()

    def end(self) -> None:
        """End all replies that are being generated, and save this replica's conversations."""
        self._server.replies.end()
        self._server.replies.join()

    def __del__(self) -> None:  # Ray calls it when it stops a replica
        with suppress(AttributeError):  # the model could not be loaded
            self.end()


class Router:
    """Sends each request to the replica (server of a cluster) that has its conversation.

    Args:
        replicas: Ray's handles of the replicas, always in the same order.
    """

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """Pass a request to the replica that has its conversation; returns the replica's response.

        A request for the list of conversations goes to all replicas, and their lists are joined.
        """
        try:
            body, path = await read_body(request), request.url.path
            given = _parsed(body)
            if path == _SESSIONS:
                return await self._overview(request)
            if path.startswith(_SESSIONS) or given.get("previous_response_id") is not None:
                return await self._of_any(request, body)
            number = owner(conversation_key(given), len(self._replicas))
            return await self._ask(number, request, body)
        except RequestError as error:
            return await show_error(request, error)

    async def _overview(self, request: Request) -> Response:
        """Return the list of all conversations, joined from the lists of all replicas.

        If a replica answers with an error, this error response is returned instead.
        """
        numbers = range(len(self._replicas))
        found = await asyncio.gather(*(self._ask(number, request, b"") for number in numbers))
        bodies = [await _whole(one) for one in found]
        for one, body in zip(found, bodies, strict=True):
            if one.status_code != 200:
                return Response(body, one.status_code, dict(one.headers))
        lists = [json.loads(one) for one in bodies]
        return JSONResponse(lists[0] | {"data": [one for each in lists for one in each["data"]]})

    async def _of_any(self, request: Request, body: bytes) -> Response:
        """Ask the replicas one after another; returns the first response whose status is not 404.

        This finds the replica for a request that names a conversation or a response by its id. If
        no replica knows the id, the last response is returned.
        """
        for number in range(len(self._replicas)):
            response = await self._ask(number, request, body)
            if response.status_code != 404:
                return response
            told = await _whole(response)
        return Response(told, 404, dict(response.headers))

    async def _ask(self, number: int, request: Request, body: bytes) -> StreamingResponse:
        """Pass a request to the replica with the number `number`; returns its response as a stream.

        Raises RequestError if the replica has died.
        """
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        scope |= {"root_path": "", "headers": [tuple(one) for one in request.scope["headers"]]}
        messages = self._replicas[number].options(stream=True).answer.remote(scope, body)
        try:
            begun = await anext(messages)
        except Exception as error:  # whatever Ray raises
            _LOG.warning("replica %d: %s", number, type(error).__name__)
            raise RequestError(
                "the replica of this conversation is starting again; try again later",
                status=503,
                headers={"Retry-After": "5"},
            ) from None

        async def pieces() -> AsyncIterator[bytes]:
            async for one in messages:
                yield one.get("body", b"")

        response = StreamingResponse(pieces(), begun["status"])
        response.raw_headers = [tuple(one) for one in begun["headers"]]
        return response


async def _whole(response: StreamingResponse) -> bytes:
    """Read the whole body of a streamed response, and return it as bytes."""
    return b"".join([bytes(piece) async for piece in response.body_iterator])  # type: ignore[arg-type]


def conversation_key(given: Mapping[str, Any]) -> bytes:
    """Hash the beginning of a conversation: the system prompt and the first user message.

    All requests of a conversation have the same hash (SHA-256). `given` is the JSON of a request,
    in the format of any of the server's APIs.
    """
    messages = given.get("messages", given.get("input", given.get("prompt")))
    said = [given.get("instructions")]
    for one in messages if isinstance(messages, list) else [{"role": "user", "content": messages}]:
        fields = one if isinstance(one, dict) else {}
        content = fields.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        said += [part.get("text") for part in parts if isinstance(part, dict)]
        if fields.get("role") == "user":
            break
    texts = [one for one in said if isinstance(one, str)]
    return sha256(json.dumps(texts).encode()).digest()


def owner(key: bytes, count: int) -> int:
    """The number, from 0 to `count` - 1, of the replica that has the conversations with this key.

    `key` is a hash from `conversation_key`; `count` is the number of replicas. If a replica is
    added, each conversation either stays at its replica or moves to the new one (rendezvous
    hashing, Thaler and Ravishankar 1998).
    """
    return max(range(count), key=lambda number: sha256(key + number.to_bytes(2)).digest())


def _parsed(body: bytes) -> dict[str, Any]:
    """Parse a request's body as a JSON object; returns {} if the body is not a JSON object.

    The replica that gets such a request answers it with an error.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def app(settings: Mapping[str, Any]) -> Any:
    """Make the Ray Serve application for `serve run sirchat.server.cluster:app NAME=VALUE ...`.

    `settings` has each VALUE by its NAME. A NAME is an attribute of `ClusterOptions`, a setting of
    sirchat, or `profile`. Raises UsageError or SettingError for a name or value that is not
    allowed.
    """
    own = {name: settings[name] for name in ClusterOptions.model_fields if name in settings}
    try:
        options = ClusterOptions.model_validate(own)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{first['loc'][0]} can't be {format_value(first['input'])}"
        raise UsageError(f"{wrong}: {first['msg']}") from None
    key = os.environ.get("SIRCHAT_API_KEY", "").strip()
    if not key:
        raise UsageError("replicas need an API key", hint="set SIRCHAT_API_KEY")
    others = {name: value for name, value in settings.items() if name not in own}
    profile = resolve(others.pop("profile", None), others, os.environ)
    try:
        from ray import serve
    except ImportError:
        hint = "pip install 'sirchat[cluster]'"
        raise UsageError("Ray Serve is not installed", hint=hint) from None
    limits = Limits(options.conversations, options.saved, options.queue)
    folder = (options.folder or served_dir()).absolute()
    actor = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    many = {"max_ongoing_requests": 100_000}  # the replica itself says how many may wait
    deployed = serve.deployment(ray_actor_options=actor, **many)(Replica)
    replicas = [
        deployed.options(name=f"replica-{number}").bind(
            profile, limits, folder / f"replica-{number}", key
        )
        for number in range(options.replicas)
    ]

    router = serve.deployment(name="router", ray_actor_options={"num_cpus": 0}, **many)(Router)
    return router.bind(*replicas)
