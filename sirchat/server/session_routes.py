"""The HTTP endpoints that show and change a conversation's memory, and the web page for them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sirchat.chat.events import Event, to_json
from sirchat.memory.policies import policy_names
from sirchat.server.conversations import Conversations, ServedConversation
from sirchat.server.reply_thread import ReplyThread
from sirchat.server.requests import MemorySettings, RequestError

_LONGEST = 10_000  # characters


class MemoryChange(MemorySettings):
    """The body of a request that changes a conversation's memory.

    First the settings are changed; then tokens are pinned, unpinned and erased, in this order. The
    fields name these tokens as the commands `/pin` and `/erase` do: by their words, by `last`, or
    by `turn N`.
    """

    pin: str | None = Field(None, min_length=1, max_length=_LONGEST)
    unpin: str | None = Field(None, min_length=1, max_length=_LONGEST)
    erase: str | None = Field(None, min_length=1, max_length=_LONGEST)

    def settings(self) -> dict[str, Any]:
        """The values, by name, of the settings that the request changes."""
        return self.model_dump(exclude_none=True, exclude={"pin", "unpin", "erase"})

    def apply(self, conversation: ServedConversation) -> list[Event]:
        """Apply this change to a conversation; returns the events that report what has changed.

        Raises SettingError or UsageError if a part of the change is not possible; the parts before
        it stay applied.
        """
        session, wanted, events = conversation.session, self.settings(), list[Event]()
        if wanted:
            events += session.switch("the request", **wanted)
            names = {*wanted, *(("policy_options",) if "policy" in wanted else ())}
            conversation.settings |= {name: getattr(session.profile, name) for name in names}
        for words, is_pinned in ((self.pin, True), (self.unpin, False)):
            if words is not None:
                events += session.pin(words, is_pinned)
        if self.erase is not None:
            events += session.erase(self.erase)
        return events


class SessionRoutes:
    """The endpoints under `/v1/sirchat/sessions`, and the web page at `/`.

    Args:
        replies: the thread that alone may use conversations.
        conversations: the server's conversations.
        body: function that reads a request's body.
    """

    def __init__(
        self,
        replies: ReplyThread,
        conversations: Conversations,
        body: Callable[[Request], Awaitable[bytes]],
    ) -> None:
        self._replies, self._conversations, self._body = replies, conversations, body
        self.routes = [
            Route("/", _page),
            Route("/v1/sirchat/sessions", self._list),
            Route("/v1/sirchat/sessions/{id}", self._show, methods=["GET"]),
            Route("/v1/sirchat/sessions/{id}", self._change, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        data = await self._call(self._conversations.overview)
        model = self._conversations.model.name
        about = {"object": "list", "model": model, "policies": policy_names()}
        return JSONResponse({**about, "data": data}, headers=_FRESH)

    async def _show(self, request: Request) -> Response:
        ident = request.path_params["id"]

        def look() -> dict[str, Any] | None:
            found = self._conversations.find(ident)
            return None if found is None else _memory(found)

        return _found(await self._call(look))

    async def _change(self, request: Request) -> Response:
        ident, change = request.path_params["id"], _parsed(await self._body(request))
        loop, saved = asyncio.get_running_loop(), asyncio.Event()

        def then() -> None:
            self._replies.wake()
            loop.call_soon_threadsafe(saved.set)

        def work() -> tuple[ServedConversation, dict[str, Any]] | None:
            changed = self._conversations.change(ident, change.apply, then)
            if changed is None:
                return None
            conversation, events = changed
            shown = {"events": [to_json(one) for one in events], **_memory(conversation)}
            return conversation, {**shown, "busy": False}

        changed = await self._call(work)
        if changed is None:
            return _found(None)
        conversation, shown = changed
        await saved.wait()
        if change.erase is not None and conversation.is_outdated:
            raise RequestError(
                "the words are erased from memory, but the conversation's file can't be written",
                status=500,
            )
        return _found(shown)

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._replies.call(work))


_FRESH = {"Cache-Control": "no-store"}


def _found(answer: dict[str, Any] | None) -> Response:
    if answer is None:
        raise RequestError("there is no such conversation; it may be dropped", status=404)
    return JSONResponse(answer, headers=_FRESH)


def _memory(conversation: ServedConversation) -> dict[str, Any]:
    """The snapshot of a conversation's memory, as a JSON object.

    The field `recall` has the setting `recall`; the field `busy` says whether a reply is being
    generated in the conversation.
    """
    snapshot = conversation.session.snapshot()
    recall = conversation.session.profile.recall
    return {**asdict(snapshot), "recall": recall, "busy": conversation.is_busy}


def _parsed(body: bytes) -> MemoryChange:
    try:
        change = MemoryChange.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{place}: {first['msg']}" if place else "the request's body is not a JSON object"
        raise RequestError(message, param=place or None) from None
    if not change.model_dump(exclude_none=True):
        allowed = ", ".join(MemoryChange.model_fields)
        raise RequestError(f"the request changes nothing; allowed: {allowed}")
    return change


async def _page(request: Request) -> Response:
    text, policy = _page_and_policy()
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **_FRESH,
        },
    )


@cache
def _page_and_policy() -> tuple[str, str]:
    """The HTML of the web page, and the content security policy to send with the page.

    The policy allows only the script and the style that the page contains.
    """
    text = files("sirchat.server").joinpath("page.html").read_text("utf-8")
    hashes = {name: _hash(text, name) for name in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(page: str, tag: str) -> str:
    inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"sha256-{b64encode(sha256(inside.encode()).digest()).decode()}"
