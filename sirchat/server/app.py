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
from sirchat.server.anthropic import MessageShape, MessagesRequest
from sirchat.server.completions import CompletionShape, Part, Shape
from sirchat.server.conversation import History
from sirchat.server.fields import RequestError, make_request, parse_object, parse_request
from sirchat.server.formats import format_of
from sirchat.server.model_routes import ModelRoutes
from sirchat.server.ollama import OllamaRequest, OllamaShape
from sirchat.server.pieces import ReplyEnd, ReplyOptions
from sirchat.server.pool import ConversationPool
from sirchat.server.reply_thread import ReplyThread, Sent, WaitingReply
from sirchat.server.requests import (
    LONGEST_NAME,
    ChatRequest,
    OwnSession,
    did_you_mean,
    notes_on,
)
from sirchat.server.responses import ResponsesRequest, ResponsesShape
from sirchat.server.saved_conversations import SavedConversations
from sirchat.server.session_routes import SessionRoutes

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
# The requests for a reply, and what makes the JSON of the reply to each.
REPLIES: dict[str, tuple[Any, Callable[..., Shape]]] = {
    "/v1/chat/completions": (ChatRequest, CompletionShape),
    "/v1/messages": (MessagesRequest, lambda asked, model: MessageShape(model)),
    "/v1/responses": (ResponsesRequest, ResponsesShape),
    "/api/chat": (OllamaRequest, lambda asked, model: OllamaShape(model)),
}
_CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["*"],
    "allow_private_network": True,
}
_MOST_NOTES = 1000  # different notes that the log has once; also characters of those of a request
_KEEPALIVE_SECONDS = 1.0  # after which a stream without an event sends a comment
_UNREAD_SECONDS = 60.0  # for which a client may leave a stream unread, while its buffers are full
_HEADERS_SECONDS = 0.5  # after which a stream begins, not counting the parsing of its request
_PIECE = 50_000  # characters of a text that are counted at once
_OWN = ("description", "model", "seed", "save", "learn_encoder")  # a client may have others
# Settings that are fixed when a model is loaded, so a request can't have others.
_LOADED = tuple(name for name in FIXED_SETTINGS if name not in _OWN)


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
    own = with_model_defaults(profile, model)
    check_profile(own, model)
    disk = SavedConversations(model, own, limits.saved, folder) if own.save else None
    conversations = ConversationPool(model, own, limits.conversations, disk, limits.reuse)
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
        self._loaded, self._profile = conversations.model, conversations.profile
        names = model_names(conversations.model.name)
        self.model = names[-1]
        about = ModelRoutes(conversations.model, names, self.replies)
        self._check_name = about.check_name
        self._told = set[str]()  # notes that the log has
        self._formats = ModelFormats()
        routes = [
            Route("/health", self._health),
            *about.routes,
            *SessionRoutes(self.replies, conversations).routes,
            *(
                Route(path, partial(self._reply, *of), methods=["POST"])
                for path, of in REPLIES.items()
            ),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]
        # Some clients take the address for the whole of it.
        short = [
            Route(route.path.removeprefix("/v1"), route.endpoint, methods=list(route.methods or ()))
            for route in routes
            if route.path.startswith("/v1/")
        ]
        self.app = Starlette(
            routes=[*routes, *short],
            middleware=[
                *([Middleware(CORSMiddleware, **_CORS, allow_origins=cors)] if cors else []),
                Middleware(Access, host=host, key=key, origins=cors),
            ],
            exception_handlers=dict.fromkeys((RequestError, HTTPException, Exception), show_error),
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _reply(
        self, kind: Any, shape_of: Callable[[Any, str], Shape], request: Request
    ) -> Response:
        asked = parse_request(await read_body(request), kind)
        shape = shape_of(asked, self.model)
        if isinstance(shape, OllamaShape) and not asked.messages:
            self._check_name(asked.model)
            return JSONResponse(shape.loaded())
        return await self._answer(request, asked.as_request(), shape, notes_on(asked))

    async def _count_tokens(self, request: Request) -> Response:
        """The tokens of a request's texts, without those that the chat template adds."""
        given = {"max_tokens": 1} | parse_object(await read_body(request))
        asked = make_request(MessagesRequest, given).as_request()
        self._check_name(asked.model)
        history = self._history(asked)
        texts = [history.system or "", history.tools, *(text for _, text in history.messages)]
        return JSONResponse({"input_tokens": await asyncio.to_thread(self._count, texts)})

    def _count(self, texts: Sequence[str]) -> int:
        encode = self._loaded.tokenizer.encode
        # No other thread runs while the tokenizer reads: a cut may add a token.
        pieces = (text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE))
        return sum(len(encode(piece, add_special_tokens=False)) for piece in pieces)

    async def _answer(
        self, request: Request, asked: ChatRequest, shape: Shape, notes: Sequence[str] = ()
    ) -> Response:
        """Generate the reply to a request; the response is a stream if the request asks for one.

        Raises RequestError if it names another model, or if the reply fails before it begins.
        """
        self._check_name(asked.model)
        options = self._options(asked)
        options.notes.extend(notes)
        name = request.headers.get("X-Sirchat-Conversation", "")[:LONGEST_NAME]
        parts = ReplyParts(self.replies, self._history(asked, name), options)
        try:
            begun = _await_unless_disconnected(request, parts.begin())
            with suppress(TimeoutError):  # then a stream begins, whose client sees it is alive
                await asyncio.wait_for(begun, _HEADERS_SECONDS if asked.stream else None)
            headers = self._note_headers(options.notes) | options.headers
            if asked.stream:
                return _EventStream(shape.events(parts), shape.media, parts, headers)
            whole = await _await_unless_disconnected(request, shape.whole_response(parts))
            return JSONResponse(whole, headers=headers)
        except BaseException:
            parts.cancel()
            raise

    def _note_headers(self, notes: list[str]) -> dict[str, str]:
        """The header that says what is not quite as the request asked; the log says it once."""
        # Some quote the request; a header and a log are safe with one line of ASCII.
        notes = [on_one_line(note).encode("ascii", "backslashreplace").decode() for note in notes]
        for note in set(notes) - self._told:
            _LOG.warning("a request is not quite met: %s", note)
        self._told = {*notes, *(self._told if len(self._told) < _MOST_NOTES else ())}
        return {"X-Sirchat-Note": "; ".join(dict.fromkeys(notes))[:_MOST_NOTES]} if notes else {}

    def _history(self, asked: ChatRequest, name: str = "") -> History:
        """The messages of a request, for the conversation `name` unless the request names one."""
        if asked.sirchat_ask is not None:
            profile = self._profile_for_ask(asked.sirchat_ask)
            return History.of_single_message(asked.messages[-1].text, profile)
        name = asked.sirchat.conversation or name
        has_own = asked.system is not None or name  # a name stands for what was sent before, too
        system = asked.system if has_own else self._profile.system
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools]
        written = json.dumps(tools, ensure_ascii=False) if tools else ""
        return History.of(system, asked.turns, written, name)

    def _profile_for_ask(self, asked: OwnSession) -> Profile:
        """The settings that a `sirchat ask` sends for its question, with the model's defaults.

        RequestError if one of them would need this server's model to be loaded in another way.
        """
        try:
            profile = Profile(**asked.settings)
        except ValidationError:
            raise RequestError("the settings are not those of this version of sirchat") from None
        if is_path(profile.policy):
            raise RequestError("a question can't name a policy of your own")
        other = [n for n in _LOADED if getattr(profile, n) != getattr(self._profile, n)]
        if server_port_file(profile.model) != server_port_file(self._profile.model):
            other.insert(0, "model")
        if other:
            value = getattr(self._profile, other[0])
            raise RequestError(f"the server has a different {other[0]}: {value}", status=409)
        return with_model_defaults(profile, self._loaded)

    def _options(self, asked: ChatRequest) -> ReplyOptions:
        """How to generate the reply; RequestError if a setting can't have the request's value."""
        if asked.sirchat_ask is not None:
            fields = asked.sirchat_ask.model_dump(exclude={"settings"})
            options = ReplyOptions(is_for_ask=True, **fields)
            return replace(options, format=partial(format_of, self._formats, asked, options.notes))
        settings, notes = asked.settings(), list[str]()
        last = asked.messages[-1]
        if last.role == "assistant" and last.text.strip() and asked.turns[-1][0] == "user":
            notes.append("the last message is the assistant's: the reply is another one after it")
        for name, value in settings.items():
            settings[name] = had = did_you_mean(name, value)
            if had != value:
                notes.append(f"{name} is {had:g}")
            try:
                changed_profile(self._profile, "the request", **{name: had})
            except SettingError as error:
                raise RequestError(str(error), param=name) from None
        if "seed" not in self._profile.model_fields_set:
            settings.setdefault("seed", secrets.randbelow(2**63))
        return ReplyOptions(
            settings,
            tuple(asked.stop),
            asked.call_parser(),
            format=partial(format_of, self._formats, asked, notes),
            must_call=bool(asked.called_tools),
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
        self._thread, self._queue = thread, asyncio.Queue[Sent]()
        self._first: Part | None = None
        self._loop = asyncio.get_running_loop()
        self._reply = WaitingReply(history, options, self._send)
        thread.submit(self._reply)

    def _send(self, part: Sent) -> None:
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
            events = _with_comments(events)
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


async def _with_comments(events: AsyncIterator[str]) -> AsyncIterator[str]:
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

    working, gone = asyncio.create_task(work), asyncio.create_task(wait_for_end())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestError("the client closed the connection", status=499)
    finally:
        working.cancel()
        gone.cancel()
