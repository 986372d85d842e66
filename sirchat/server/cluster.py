"""Runs several servers, called replicas, with Ray Serve, on one machine or on many.

A hash of a conversation's name or beginning selects its replica: all its requests go there. A
replica that died is started again, and finds its conversations in a folder that all machines share.
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
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.errors import UsageError, format_value
from sirchat.memory.archive_folder import sweep
from sirchat.models.ending_thread import call_in_new_thread
from sirchat.models.load import load_model_of
from sirchat.paths import archives_dir, served_dir
from sirchat.server.access import read_body, show_error
from sirchat.server.app import Limits, open_server
from sirchat.server.fields import RequestError
from sirchat.server.requests import LONGEST_NAME

_SESSIONS = "/v1/sirchat/sessions"
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string")
_LOG = logging.getLogger(__name__)


class ClusterOptions(BaseModel):
    """The number of replicas, and what each of them has.

    Attributes:
        conversations, saved, queue, reuse: see `Limits`.
        cpus: number of CPUs that Ray reserves, and number of threads.
        gpus: number of GPUs; it may be a fraction.
        folder: where conversations are saved; each replica has a folder of its own in it.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1, le=1000)
    conversations: int = Field(8, ge=1, le=1000)
    saved: int = Field(100, ge=1, le=10000)
    queue: int = Field(256, ge=0, le=10000)
    reuse: Literal["exact", "messages"] = "messages"
    cpus: float = Field(1, gt=0)
    gpus: float = Field(0, ge=0)
    folder: Path | None = None


class Replica:
    """One of the servers; no other uses its conversations, nor the `folder` with their files."""

    def __init__(self, profile: Profile, limits: Limits, folder: Path, key: str) -> None:
        sweep(archives_dir())  # removes archives of replicas that were killed
        model = call_in_new_thread(lambda: load_model_of(profile))
        self._server = open_server(model, profile, limits, folder=folder, host="0.0.0.0", key=key)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Answer a request, given by its ASGI scope and body; yields the ASGI messages."""
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
        """End all replies, and save the conversations."""
        self._server.replies.end()
        self._server.replies.join()

    def __del__(self) -> None:  # Ray calls it when it stops a replica
        with suppress(AttributeError):  # the model could not be loaded
            self.end()


class Router:
    """Sends each request to the replica that has its conversation.

    `replicas` are Ray's handles, always in the same order.
    """

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """The response of the replica that has the conversation; for the list, of all replicas."""
        try:
            body, path = await read_body(request), request.url.path
            given = _parse_object(body)
            if path == _SESSIONS:
                return await self._overview(request)
            if path.startswith(_SESSIONS) or given.get("previous_response_id") is not None:
                return await self._ask_each_until_found(request, body)
            name = request.headers.get("X-Sirchat-Conversation", "")[:LONGEST_NAME]
            number = replica_of(conversation_key(given, name), len(self._replicas))
            return await self._forward(number, request, body)
        except RequestError as error:
            return await show_error(request, error)

    async def _overview(self, request: Request) -> Response:
        """The list of all replicas' conversations; if a replica returns an error, that error."""
        numbers = range(len(self._replicas))
        responses = await asyncio.gather(
            *(self._forward(number, request, b"") for number in numbers)
        )
        lists = []
        for response in responses:
            body = await _read_response(response)
            if response.status_code != 200:
                return Response(body, response.status_code, dict(response.headers))
            lists.append(json.loads(body))
        data = [conversation for each in lists for conversation in each["data"]]
        return JSONResponse(lists[0] | {"data": data})

    async def _ask_each_until_found(self, request: Request, body: bytes) -> Response:
        """Ask one replica after another; returns the first response that is not 404, if any."""
        for number in range(len(self._replicas)):
            response = await self._forward(number, request, body)
            if response.status_code != 404:
                return response
            told = await _read_response(response)
        return Response(told, 404, dict(response.headers))

    async def _forward(self, number: int, request: Request, body: bytes) -> StreamingResponse:
        """The response of one replica, as a stream; RequestError if the replica has died."""
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        scope |= {"root_path": "", "headers": [tuple(pair) for pair in request.scope["headers"]]}
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
            async for message in messages:
                yield message.get("body", b"")

        response = StreamingResponse(pieces(), begun["status"])
        response.raw_headers = [tuple(pair) for pair in begun["headers"]]
        return response


def conversation_key(given: Mapping[str, Any], name: str = "") -> bytes:
    """Hash (SHA-256) a conversation's name, or else its system prompt and first user message.

    `given` is the JSON of a request, in the shape of any of the server's APIs; `name` is the
    header's, which what the JSON says comes before.
    """
    own, memory = given.get("conversation"), given.get("sirchat")
    own = own.get("id") if isinstance(own, dict) else own
    name = own or (memory.get("conversation") if isinstance(memory, dict) else None) or name
    if name:
        return sha256(json.dumps({"conversation": name}).encode()).digest()
    messages = given.get("messages", given.get("input", given.get("prompt")))
    said = [given.get("instructions")]
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": messages}]
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        content = fields.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        said += [part.get("text") for part in parts if isinstance(part, dict)]
        if fields.get("role") == "user":
            break
    texts = [text for text in said if isinstance(text, str)]
    return sha256(json.dumps(texts).encode()).digest()


def replica_of(key: bytes, count: int) -> int:
    """Which of `count` replicas has the conversations with this key of `conversation_key`.

    With one replica more, each stays or moves to the new one (rendezvous hashing, Thaler and
    Ravishankar 1998).
    """
    return max(range(count), key=lambda number: sha256(key + number.to_bytes(2)).digest())


def app(settings: Mapping[str, Any]) -> Any:
    """The Ray Serve application for `serve run sirchat.server.cluster:app NAME=VALUE ...`.

    A NAME is a field of `ClusterOptions`, a setting of sirchat, or `profile`; UsageError or
    SettingError for what is not allowed.
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
    limits = Limits(options.conversations, options.saved, options.queue, options.reuse)
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


async def _read_response(response: StreamingResponse) -> bytes:
    return b"".join([bytes(piece) async for piece in response.body_iterator])  # type: ignore[arg-type]


def _parse_object(body: bytes) -> dict[str, Any]:
    """A request's body; {} if it is no JSON object, which the replica answers with an error."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
