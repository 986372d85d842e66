"""The HTTP endpoints that show and change a conversation's memory, and the web page for them."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sirchat.chat.events import Event, to_json
from sirchat.memory.policies import is_path, policy_names
from sirchat.server.access import read_body
from sirchat.server.conversation import ServedConversation
from sirchat.server.fields import RequestError, RequestObject, make_request, parse_json_object
from sirchat.server.pool import ConversationPool
from sirchat.server.reply_thread import ReplyThread

_NO_STORE = {"Cache-Control": "no-store"}

_Target = Annotated[str | None, Field(min_length=1, max_length=10_000)]  # as `/pin` takes it


class MemoryChange(RequestObject):
    """The body of a request to change a conversation's memory, in the order of the fields."""

    model_config = ConfigDict(extra="forbid")
    policy: str | None = None
    budget: int | None = None
    decay: float | None = None
    recall: str | None = None
    pin: _Target = None
    unpin: _Target = None
    erase: _Target = None

    def check(self) -> None:
        """Raise RequestError if the request changes nothing, or names a policy `module:Class`."""
        if not self.model_fields_set:
            allowed = ", ".join(MemoryChange.model_fields)
            raise RequestError(f"the request changes nothing; allowed: {allowed}")
        if self.policy is not None and is_path(self.policy):  # code that a client chose would run
            raise RequestError("a request can't name a policy of your own", param="policy")

    def apply(self, conversation: ServedConversation) -> list[Event]:
        """Apply this change to a conversation; returns the events that report it.

        Raises SettingError or UsageError if a part is impossible; earlier parts stay applied.
        """
        session, events = conversation.session, list[Event]()
        setting_names = {"policy", "budget", "decay", "recall"}
        if settings := self.model_dump(exclude_none=True, include=setting_names):
            events += session.switch("the request", **settings)
            names = {*settings, *(("policy_options",) if "policy" in settings else ())}
            conversation.settings |= {name: getattr(session.profile, name) for name in names}
        for words, is_pinned in ((self.pin, True), (self.unpin, False)):
            if words is not None:
                events += session.pin(words, is_pinned)
        if self.erase is not None:
            events += session.erase(self.erase)
        return events


class SessionRoutes:
    """The endpoints under `/v1/sirchat/sessions`, and the web page at `/`."""

    def __init__(self, replies: ReplyThread, conversations: ConversationPool) -> None:
        self._replies, self._conversations = replies, conversations
        self.routes = [
            Route("/", _page),
            Route("/v1/sirchat/sessions", self._list),
            Route("/v1/sirchat/sessions/{id}", self._show, methods=["GET"]),
            Route("/v1/sirchat/sessions/{id}", self._change, methods=["POST"]),
            Route("/v1/sirchat/sessions/{id}/facts", self._facts, methods=["GET"]),
        ]

    async def _list(self, request: Request) -> Response:
        data = await self._call(self._conversations.overview)
        model = self._conversations.model.name
        fields = {"object": "list", "model": model, "policies": policy_names()}
        return JSONResponse({**fields, "data": data}, headers=_NO_STORE)

    async def _show(self, request: Request) -> Response:
        ident = request.path_params["id"]
        memory = await self._call(lambda: _memory(self._conversations.find(ident)))
        return JSONResponse(memory, headers=_NO_STORE)

    async def _facts(self, request: Request) -> Response:
        ident, words = request.path_params["id"], request.query_params.get("words", "")
        facts = await self._call(lambda: self._conversations.find(ident).session.facts(words))
        return JSONResponse(
            {"object": "list", "data": [{**asdict(one), "state": one.state} for one in facts]},
            headers=_NO_STORE,
        )

    async def _change(self, request: Request) -> Response:
        ident = request.path_params["id"]
        change = make_request(MemoryChange, parse_json_object(await read_body(request)))
        loop, saved = asyncio.get_running_loop(), asyncio.Event()

        def on_saved() -> None:
            self._replies.wake()
            loop.call_soon_threadsafe(saved.set)

        def work() -> tuple[ServedConversation, dict[str, Any]]:
            conversation, events = self._conversations.change(ident, change.apply, on_saved)
            memory = {"events": [to_json(event) for event in events], **_memory(conversation)}
            return conversation, {**memory, "busy": False}

        conversation, memory = await self._call(work)
        await saved.wait()
        if change.erase is not None and conversation.is_outdated:
            raise RequestError(
                "the words are erased from memory, but the conversation's file can't be written",
                status=500,
            )
        return JSONResponse(memory, headers=_NO_STORE)

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Call `work` in the only thread that may use conversations."""
        return await asyncio.wrap_future(self._replies.call(work))


def _memory(conversation: ServedConversation) -> dict[str, Any]:
    snapshot = asdict(conversation.session.snapshot())
    session = conversation.session
    added = {"recall": session.profile.recall, "left_out": len(session.ledger.left_out)}
    return {**snapshot, **added, "busy": conversation.is_busy}


async def _page(request: Request) -> Response:
    text, policy = _page_and_policy()
    safe = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, **safe, **_NO_STORE})


@cache
def _page_and_policy() -> tuple[str, str]:
    """The web page, and a content security policy that allows only its own script and style."""
    text = files("sirchat.server").joinpath("page.html").read_text("utf-8")
    parts = re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    hashes = ((tag, b64encode(sha256(part.encode()).digest()).decode()) for tag, part in parts)
    sources = "; ".join(f"{tag}-src 'sha256-{value}'" for tag, value in hashes)
    denied = "; ".join(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors"))
    return text, f"default-src 'none'; {sources}; connect-src 'self'; {denied}"
