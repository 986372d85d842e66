"""The server's HTTP endpoints, which follow the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sirchat.chat.formats import ModelFormats
from sirchat.chat.model_defaults import with_model_defaults
from sirchat.chat.settings import check_profile
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError, format_value, on_one_line
from sirchat.models.model import LoadedModel
from sirchat.server import anthropic, responses
from sirchat.server.access import Access, read_body, show_error
from sirchat.server.anthropic import MessageSerializer
from sirchat.server.conversation import History
from sirchat.server.fields import Fields, RequestError, make_request, parse_json_object
from sirchat.server.pool import ConversationPool, Limits
from sirchat.server.replies import ReplyOptions, reply_format
from sirchat.server.reply_thread import ReplyThread
from sirchat.server.requests import (
    MAX_NAME_CHARS,
    ChatRequest,
    clamped_setting,
)
from sirchat.server.responses import ResponsesSerializer
from sirchat.server.session_routes import SessionRoutes
from sirchat.server.streaming import (
    ChatCompletionSerializer,
    EventStream,
    ReplyParts,
    ReplySerializer,
    await_unless_disconnected,
)

# Of each API: what puts its requests into the form of chat completions, what it calls the fields of
# these, and the form of its replies.
_APIS: dict[
    str,
    tuple[Callable[[Fields], Fields], dict[str, str], Callable[[Fields, str], ReplySerializer]],
] = {
    "/v1/chat/completions": (dict, {}, ChatCompletionSerializer),
    "/v1/messages": (anthropic.chat_fields, anthropic.NAMES, MessageSerializer),
    "/v1/responses": (responses.chat_fields, responses.NAMES, ResponsesSerializer),
}
_CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["*"],
    "allow_private_network": True,
}
_MAX_HEADER_CHARS = 1000  # of the notes of one request
_HEADERS_SECONDS = 0.5  # after which a stream begins, not counting the parsing of its request
_CHARS_PER_ENCODING = 50_000  # characters of a text that are counted at once


class ChatServer:
    """The HTTP server of one model; `app` is an ASGI application with all endpoints.

    It continues the conversations saved in `folder`; `profile` has the settings of all. Requests
    need the API key `key`, unless it is None; web pages of the origins `cors` may send them, too.
    `model` is its name for clients. The thread `replies` generates the replies. Raises SettingError
    if a setting does not work on a server.
    """

    def __init__(
        self,
        model: LoadedModel,
        profile: Profile,
        limits: Limits,
        *,
        folder: Path,
        host: str,
        key: str | None,
        cors: Sequence[str] = (),
    ) -> None:
        self._model, self._profile = model, with_model_defaults(profile, model)
        check_profile(self._profile, model)
        self.conversations = ConversationPool(model, self._profile, limits, folder)
        self.replies = ReplyThread(self.conversations, limits.conversations + limits.queue)
        # The model's names for clients: its full one, and the part after the last slash.
        self._names = model.name, model.name.rstrip("/").rpartition("/")[2]
        self.model, self._loaded_at = self._names[-1], int(time.time())
        self._formats = ModelFormats()
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            *SessionRoutes(self.replies, self.conversations).routes,
            *(Route(p, partial(self._reply, p), methods=["POST"]) for p in _APIS),
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

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about_model]})

    async def _show_model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._about_model)

    @property
    def _about_model(self) -> dict[str, Any]:
        fields = {"object": "model", "created": self._loaded_at, "owned_by": "sirchat"}
        # Histories may be longer than the context: what is evicted is archived.
        length = self._model.context_length
        return {"id": self.model, **fields, "context_length": length, "max_model_len": length}

    def _check_name(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise RequestError(
                f"there is no model {format_value(name)}; this server has {self.model}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _reply(self, endpoint: str, request: Request) -> Response:
        """Generate the reply to a request; the response is a stream if the request asks for one."""
        body = parse_json_object(await read_body(request))
        chat = chat_request(endpoint, body)
        self._check_name(chat.model)
        *_, make_serializer = _APIS[endpoint]
        serializer = make_serializer(body, self.model)
        options = self._options(chat)
        options.notes.extend(chat.ignored_fields_notes())
        name = conversation_header(request)
        client = request.client.host if request.client else None
        parts = ReplyParts(self.replies, self._history(chat, name), options, client)
        try:
            first_part = await_unless_disconnected(request, parts.begin())
            with suppress(TimeoutError):  # then a stream begins, whose client sees it is alive
                await asyncio.wait_for(first_part, _HEADERS_SECONDS if chat.stream else None)
            headers = _note_headers(options.notes) | options.headers
            if chat.stream:
                return EventStream(serializer.events(parts), parts, headers)
            content = await await_unless_disconnected(request, serializer.collect_response(parts))
            return JSONResponse(content, headers=headers)
        except BaseException:
            parts.cancel()
            raise

    async def _count_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's texts, without those that the chat template adds."""
        chat = chat_request("/v1/messages", parse_json_object(await read_body(request)))
        self._check_name(chat.model)
        history = self._history(chat)
        texts = [history.system or "", history.tools, *(text for _, text in history.messages)]
        # No other thread runs while the tokenizer reads a text; a cut may add a token.
        starts = [(t, i) for t in texts for i in range(0, len(t), _CHARS_PER_ENCODING)]
        texts = [text[start : start + _CHARS_PER_ENCODING] for text, start in starts]
        encode = partial(self._model.tokenizer.encode, add_special_tokens=False)
        counts = await asyncio.to_thread(lambda: [len(encode(text)) for text in texts])
        return JSONResponse({"input_tokens": sum(counts)})

    def _history(self, chat: ChatRequest, name: str = "") -> History:
        """The messages of a request, for the conversation `name` unless the request names one."""
        name = chat.sirchat.conversation or name
        # A name stands for what was sent before, also a system prompt.
        uses_default = chat.system is None and not name
        system = self._profile.system if uses_default else chat.system
        tools = [tool.model_dump(exclude_none=True) for tool in chat.tools]
        tools_json = json.dumps(tools, ensure_ascii=False) if tools else ""
        return History.of(system, chat.turns, tools_json, name)

    def _options(self, chat: ChatRequest) -> ReplyOptions:
        """How to generate the reply; raises RequestError if a setting can't have this value."""
        settings, notes = chat.settings(), list[str]()
        make_format = partial(reply_format, self._formats, chat, notes)
        last = chat.messages[-1]
        if last.role == "assistant" and last.text.strip() and chat.turns[-1][0] == "user":
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
            tuple(chat.stop),
            chat.call_parser(),
            format=make_format,
            must_call=bool(chat.required_tools),
            notes=notes,
        )


def _note_headers(notes: list[str]) -> dict[str, str]:
    """A header that says what differs from the request."""
    # Some quote the request; a header is safe with one line of ASCII.
    safe = (on_one_line(note).encode("ascii", "backslashreplace").decode() for note in notes)
    header = "; ".join(dict.fromkeys(safe))[:_MAX_HEADER_CHARS]
    return {"X-Sirchat-Note": header} if notes else {}


def conversation_header(request: Request) -> str:
    """The name of the conversation that a header gives; "" if it gives none."""
    name = request.headers.get("X-Sirchat-Conversation", "")
    with suppress(UnicodeDecodeError):  # Starlette reads a header as Latin-1; most send UTF-8
        name = name.encode("latin-1").decode()
    return name[:MAX_NAME_CHARS]


def chat_request(endpoint: str, body: Fields) -> ChatRequest:
    """A request for a reply in the form of chat completions; raises RequestError if invalid."""
    to_chat, names, _ = _APIS.get(endpoint, (dict, {}, None))
    return make_request(ChatRequest, to_chat(body), names=names)
