"""The server's HTTP endpoints, which follow the APIs of OpenAI and Ollama."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from sirchat.chat.formats import ModelFormats
from sirchat.chat.model_defaults import with_model_defaults
from sirchat.chat.settings import check_profile
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError, on_one_line
from sirchat.memory.policies import is_path
from sirchat.models.model import LoadedModel
from sirchat.paths import server_port_file
from sirchat.server.access import Access, read_body, show_error
from sirchat.server.anthropic import MessageSerializer, MessagesRequest
from sirchat.server.completions import ChatCompletionSerializer, Part, ReplySerializer
from sirchat.server.conversation import History
from sirchat.server.fields import RequestError, make_request, parse_json_object, parse_request
from sirchat.server.formats import reply_format
from sirchat.server.model_routes import ModelRoutes
from sirchat.server.ollama import OllamaRequest, OllamaSerializer
from sirchat.server.parts import ReplyEnd, ReplyOptions
from sirchat.server.pool import ConversationPool
from sirchat.server.reply_thread import ReplyThread, SentPart, WaitingReply
from sirchat.server.requests import (
    MAX_NAME_CHARS,
    AskFields,
    ChatRequest,
    clamped_setting,
    ignored_parts_notes,
)
from sirchat.server.responses import ResponsesRequest, ResponsesSerializer
from sirchat.server.saved_conversations import SavedConversations
from sirchat.server.session_routes import SessionRoutes

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
# The requests for a reply, and what makes the JSON of the reply to each.
REPLY_ENDPOINTS: dict[str, tuple[Any, Callable[..., ReplySerializer]]] = {
    "/v1/chat/completions": (ChatRequest, ChatCompletionSerializer),
    "/v1/messages": (MessagesRequest, lambda asked, model: MessageSerializer(model)),
    "/v1/responses": (ResponsesRequest, ResponsesSerializer),
    "/api/chat": (OllamaRequest, lambda asked, model: OllamaSerializer(model)),
}
_CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["*"],
    "allow_private_network": True,
}
_MAX_LOGGED_NOTES = (
    1000  # different notes that the log has once; also characters of those of a request
)
_KEEPALIVE_SECONDS = 1.0  # after which a stream without an event sends a comment
_UNREAD_SECONDS = 60.0  # for which a client may leave a stream unread, while its buffers are full
_HEADERS_SECONDS = 0.5  # after which a stream begins, not counting the parsing of its request
_CHARS_PER_ENCODING = 50_000  # characters of a text that are counted at once
_CLIENT_SETTINGS = (
    "description",
    "model",
    "seed",
    "save",
    "learn_encoder",
)  # a client may have others
# Settings that are fixed when a model is loaded, so a request can't have others.
_MODEL_SETTINGS = tuple(name for name in FIXED_SETTINGS if name not in _CLIENT_SETTINGS)


class Limits(BaseModel):
    """How many conversations a server has in memory and on disk, and how many requests may wait.

    `reuse`: what of a request is not read again: `messages` that a conversation has read, wherever
    they stand now; or `exact`, only those before which nothing has changed.
    """

    model_config = ConfigDict(frozen=True)

    conversations: int = Field(default=8, ge=1, le=1000)
    saved: int = Field(default=100, ge=1, le=10000)
    queue: int = Field(default=256, ge=0, le=10000)
    reuse: Literal["exact", "messages"] = "messages"


def open_server(
    model: LoadedModel,
    profile: Profile,
    limits: Limits,
    *,
    folder: Path,
    host: str,
    key: str | None,
    cors: Sequence[str] = (),
) -> ChatServer:
    """The server of a loaded model, which continues the conversations saved in `folder`.

    `profile` has the settings of all conversations; SettingError if one does not work here. Web
    pages of the origins `cors` may ask.
    """
    full_profile = with_model_defaults(profile, model)
    check_profile(full_profile, model)
    disk = (
        SavedConversations(model, full_profile, limits.saved, folder) if full_profile.save else None
    )
    conversations = ConversationPool(model, full_profile, limits.conversations, disk, limits.reuse)
    return ChatServer(conversations, queue=limits.queue, host=host, key=key, cors=cors)


class ChatServer:
    """The HTTP server of one model: `app` is an ASGI application with all endpoints.

    Requests need the API key `key`, unless it is None. `model` is its name for clients, `replies`
    the thread that generates the replies; `queue` requests may wait until a conversation is free.
    Web pages of the origins `cors` may ask, too.
    """

    def __init__(
        self,
        conversations: ConversationPool,
        *,
        queue: int,
        host: str,
        key: str | None,
        cors: Sequence[str] = (),
    ) -> None:
        self.replies = ReplyThread(conversations, conversations.limit + queue)
        self._model, self._profile = conversations.model, conversations.profile
        names = model_names(conversations.model.name)
        self.model = names[-1]
        model_routes = ModelRoutes(conversations.model, names, self.replies)
        self._check_model = model_routes.check_name
        self._logged_notes = set[str]()  # notes that the log has
        self._formats = ModelFormats()
        routes = [
            Route("/health", self._health),
            *model_routes.routes,
            *SessionRoutes(self.replies, conversations).routes,
            *(
                Route(path, partial(self._reply, *of), methods=["POST"])
                for path, of in REPLY_ENDPOINTS.items()
            ),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]
        # Some clients take the address for the whole of it.
        short_routes = [
            Route(route.path.removeprefix("/v1"), route.endpoint, methods=list(route.methods or ()))
            for route in routes
            if route.path.startswith("/v1/")
        ]
        self.app = Starlette(
            routes=[*routes, *short_routes],
            middleware=[
                *([Middleware(CORSMiddleware, **_CORS, allow_origins=cors)] if cors else []),
                Middleware(Access, host=host, key=key, origins=cors),
            ],
            exception_handlers=dict.fromkeys((RequestError, HTTPException, Exception), show_error),
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _reply(
        self,
        body_class: Any,
        serializer_of: Callable[[Any, str], ReplySerializer],
        request: Request,
    ) -> Response:
        body = parse_request(await read_body(request), body_class)
        serializer = serializer_of(body, self.model)
        if isinstance(serializer, OllamaSerializer) and not body.messages:
            self._check_model(body.model)
            return JSONResponse(serializer.loaded_body())
        return await self._respond(
            request, body.as_chat_request(), serializer, ignored_parts_notes(body)
        )

    async def _count_tokens(self, request: Request) -> Response:
        """The tokens of a request's texts, without those that the chat template adds."""
        fields = {"max_tokens": 1} | parse_json_object(await read_body(request))
        chat_request = make_request(MessagesRequest, fields).as_chat_request()
        self._check_model(chat_request.model)
        history = self._history(chat_request)
        texts = [history.system or "", history.tools, *(text for _, text in history.messages)]
        return JSONResponse({"input_tokens": await asyncio.to_thread(self._count, texts)})

    def _count(self, texts: Sequence[str]) -> int:
        encode = self._model.tokenizer.encode
        # No other thread runs while the tokenizer reads: a cut may add a token.
        pieces = (
            text[start : start + _CHARS_PER_ENCODING]
            for text in texts
            for start in range(0, len(text), _CHARS_PER_ENCODING)
        )
        return sum(len(encode(piece, add_special_tokens=False)) for piece in pieces)

    async def _respond(
        self,
        request: Request,
        asked: ChatRequest,
        shape: ReplySerializer,
        notes: Sequence[str] = (),
    ) -> Response:
        """Generate the reply to a request; the response is a stream if the request asks for one.

        Raises RequestError if it names another model, or if the reply fails before it begins.
        """
        self._check_model(asked.model)
        options = self._options(asked)
        options.notes.extend(notes)
        name = request.headers.get("X-Sirchat-Conversation", "")[:MAX_NAME_CHARS]
        parts = ReplyParts(self.replies, self._history(asked, name), options)
        try:
            begun = _await_unless_disconnected(request, parts.begin())
            with suppress(TimeoutError):  # then a stream begins, whose client sees it is alive
                await asyncio.wait_for(begun, _HEADERS_SECONDS if asked.stream else None)
            headers = self._note_headers(options.notes) | options.headers
            if asked.stream:
                return _EventStream(shape.events(parts), shape.media, parts, headers)
            whole = await _await_unless_disconnected(request, shape.collect_response(parts))
            return JSONResponse(whole, headers=headers)
        except BaseException:
            parts.cancel()
            raise

    def _note_headers(self, notes: list[str]) -> dict[str, str]:
        """The header that says what is not quite as the request asked; the log says it once."""
        # Some quote the request; a header and a log are safe with one line of ASCII.
        notes = [on_one_line(note).encode("ascii", "backslashreplace").decode() for note in notes]
        for note in set(notes) - self._logged_notes:
            _LOG.warning("a request is not quite met: %s", note)
        self._logged_notes = {
            *notes,
            *(self._logged_notes if len(self._logged_notes) < _MAX_LOGGED_NOTES else ()),
        }
        return (
            {"X-Sirchat-Note": "; ".join(dict.fromkeys(notes))[:_MAX_LOGGED_NOTES]} if notes else {}
        )

    def _history(self, chat_request: ChatRequest, name: str = "") -> History:
        """The messages of a request, for the conversation `name` unless the request names one."""
        if chat_request.sirchat_ask is not None:
            profile = self._profile_for_ask(chat_request.sirchat_ask)
            return History.of_single_message(chat_request.messages[-1].text, profile)
        name = chat_request.sirchat.conversation or name
        keeps_own_prompt = (
            chat_request.system is not None or name
        )  # a name stands for what was sent before, too
        system = chat_request.system if keeps_own_prompt else self._profile.system
        tools = [tool.model_dump(exclude_none=True) for tool in chat_request.tools]
        tools_json = json.dumps(tools, ensure_ascii=False) if tools else ""
        return History.of(system, chat_request.turns, tools_json, name)

    def _profile_for_ask(self, ask: AskFields) -> Profile:
        """The settings that a `sirchat ask` sends for its question, with the model's defaults.

        RequestError if one of them would need this server's model to be loaded in another way.
        """
        try:
            profile = Profile(**ask.settings)
        except ValidationError:
            raise RequestError("the settings are not those of this version of sirchat") from None
        if is_path(profile.policy):
            raise RequestError("a question can't name a policy of your own")
        different = [
            name
            for name in _MODEL_SETTINGS
            if getattr(profile, name) != getattr(self._profile, name)
        ]
        if server_port_file(profile.model) != server_port_file(self._profile.model):
            different.insert(0, "model")
        if different:
            value = getattr(self._profile, different[0])
            raise RequestError(f"the server has a different {different[0]}: {value}", status=409)
        return with_model_defaults(profile, self._model)

    def _options(self, chat_request: ChatRequest) -> ReplyOptions:
        """How to generate the reply; RequestError if a setting can't have the request's value."""
        if chat_request.sirchat_ask is not None:
            fields = chat_request.sirchat_ask.model_dump(exclude={"settings"})
            options = ReplyOptions(is_for_ask=True, **fields)
            return replace(
                options, format=partial(reply_format, self._formats, chat_request, options.notes)
            )
        settings, notes = chat_request.settings(), list[str]()
        last = chat_request.messages[-1]
        if last.role == "assistant" and last.text.strip() and chat_request.turns[-1][0] == "user":
            notes.append("the last message is the assistant's: the reply is another one after it")
        for name, value in settings.items():
            settings[name] = allowed = clamped_setting(name, value)
            if allowed != value:
                notes.append(f"{name} is {allowed:g}")
            try:
                changed_profile(self._profile, "the request", **{name: allowed})
            except SettingError as error:
                raise RequestError(str(error), param=name) from None
        if "seed" not in self._profile.model_fields_set:
            settings.setdefault("seed", secrets.randbelow(2**63))
        return ReplyOptions(
            settings,
            tuple(chat_request.stop),
            chat_request.call_parser(),
            format=partial(reply_format, self._formats, chat_request, notes),
            must_call=bool(chat_request.required_tools),
            notes=notes,
        )


def model_names(model: str) -> tuple[str, ...]:
    """The names by which clients may call a model: its full name, and its part after the last /."""
    return tuple(dict.fromkeys((model, model.rstrip("/").rpartition("/")[2])))


class ReplyParts:
    """The parts of the reply to a request, which another thread generates.

    A new instance submits it; iterating raises RequestError if it fails.
    """

    def __init__(self, thread: ReplyThread, history: History, options: ReplyOptions) -> None:
        self._thread, self._queue = thread, asyncio.Queue[SentPart]()
        self._first: Part | None = None
        self._loop = asyncio.get_running_loop()
        self._reply = WaitingReply(history, options, self._send)
        thread.submit(self._reply)

    def _send(self, part: SentPart) -> None:
        with suppress(RuntimeError):  # the event loop has ended: no client is left
            self._loop.call_soon_threadsafe(self._queue.put_nowait, part)

    async def begin(self) -> None:
        """Wait for the first part of the reply; raises RequestError if the reply fails first."""
        self._first = await self._next()

    async def __aiter__(self) -> AsyncIterator[Part]:
        part = self._first or await self._next()
        yield part
        while not isinstance(part, ReplyEnd):
            part = await self._next()
            yield part

    def cancel(self) -> None:
        """Stop generating the reply, because the client no longer waits for it."""
        self._thread.cancel(self._reply)

    async def _next(self) -> Part:
        part = await self._queue.get()
        if isinstance(part, RequestError):
            raise part
        return part


class _EventStream(StreamingResponse):
    """A streamed HTTP response; the reply is cancelled if the client leaves, or reads no more."""

    def __init__(
        self, events: AsyncIterator[str], media: str, parts: ReplyParts, headers: dict[str, str]
    ) -> None:
        if media == "text/event-stream":
            events = _with_keepalives(events)
        super().__init__(events, headers={"Cache-Control": "no-store", **headers}, media_type=media)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(event: Message) -> None:
            async with asyncio.timeout(_UNREAD_SECONDS):
                await send(event)

        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._parts.cancel()


async def _with_keepalives(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Server-sent events, with a comment, by which the client waits on, in each long silence."""
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait((following,), timeout=_KEEPALIVE_SECONDS)
            if not following.done():
                yield ": waiting\n\n"
                continue
            if (event := following.result()) is None:
                return
            yield event
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()


async def _await_unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the result of `work`; RequestError if the client closes the connection first."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.create_task(work), asyncio.create_task(wait_for_end())
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("the client closed the connection", status=499)
    finally:
        task.cancel()
        disconnected.cancel()
