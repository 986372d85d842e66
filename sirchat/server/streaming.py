"""How a reply reaches its client: part by part from its thread, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sirchat.server.conversation import History
from sirchat.server.fields import Fields, RequestError
from sirchat.server.replies import ReplyEnd, ReplyOptions, ReplyText
from sirchat.server.reply_thread import ReplyThread, SentPart, WaitingReply

_KEEPALIVE_SECONDS = 1.0  # after which a stream without an event sends a comment
_UNREAD_SECONDS = 60.0  # for which a client may leave a stream unread, while its buffers are full

Result = TypeVar("Result")
Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


class ReplySerializer:
    """The form in which an API sends a reply: one JSON object, or a stream of events."""

    async def collect_response(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the response."""
        reply = ReplyText("")
        async for part in parts:
            if isinstance(part, ReplyEnd):
                return self.response_body(reply, part)
            reply += part
        raise AssertionError("a reply has an end")

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the events of the streamed response, while the reply is generated."""
        for event in self.first_events():
            yield event
        try:
            async for part in parts:
                write: Any = self.last_events if isinstance(part, ReplyEnd) else self.part_events
                for event in write(part):
                    yield event
        except RequestError as error:
            for event in self.error_events(error):
                yield event

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with this reply, in one part."""
        raise NotImplementedError

    def first_events(self) -> Iterable[str]:
        raise NotImplementedError

    def part_events(self, part: ReplyText) -> Iterable[str]:
        raise NotImplementedError

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        raise NotImplementedError

    def error_events(self, error: RequestError) -> Iterable[str]:
        """The last events, if the reply fails."""
        return (server_sent_event(error.body),)


def server_sent_event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event with `content` as JSON; `name` is its type, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class ReplyParts:
    """The parts of the reply to a request, which another thread generates.

    A new instance submits the reply; iterating raises RequestError if the reply fails.
    """

    def __init__(
        self, thread: ReplyThread, history: History, options: ReplyOptions, client: str | None
    ) -> None:
        self._thread, self._queue = thread, asyncio.Queue[SentPart]()
        self._first: SentPart | None = None
        self._loop = asyncio.get_running_loop()
        self._reply = WaitingReply(history, options, self._send, client)
        thread.submit(self._reply)

    def _send(self, part: SentPart) -> None:
        with suppress(RuntimeError):  # the event loop has ended: no client is left
            self._loop.call_soon_threadsafe(self._queue.put_nowait, part)

    async def begin(self) -> None:
        """Wait for the first part of the reply; raises RequestError if the reply fails first."""
        self._first = await self._queue.get()  # also an error: the caller may have waited no more
        _part(self._first)

    async def __aiter__(self) -> AsyncIterator[Part]:
        part = _part(self._first or await self._queue.get())
        yield part
        while not isinstance(part, ReplyEnd):
            part = _part(await self._queue.get())
            yield part

    def cancel(self) -> None:
        """Stop generating the reply, because the client no longer waits for it."""
        self._thread.cancel(self._reply)


def _part(sent: SentPart) -> Part:
    if isinstance(sent, RequestError):
        raise sent
    return sent


class EventStream(StreamingResponse):
    """A streamed HTTP response; the reply is cancelled if the client leaves or stops reading."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], parts: ReplyParts, headers: dict[str, str]
    ) -> None:
        events = _with_keepalives(events)
        super().__init__(events, headers={"Cache-Control": "no-store", **headers})
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
    """Add a comment to the events in each long silence, so that the client keeps waiting."""
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


async def await_unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the result of `work`; raises RequestError if the client disconnects first."""

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


class ChatCompletionSerializer(ReplySerializer):
    def __init__(self, request: Fields, model: str) -> None:
        self._includes_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        reply_id = f"chatcmpl-{secrets.token_hex(12)}"
        self._common = {"id": reply_id, "created": int(time.time()), "model": model}
        self._sent_calls = 0  # number of calls sent so far
        self._has_sent_id = False  # of the conversation, for who stops the reply

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.calls:
            calls = [call.message() for call in reply.calls]
            message |= {"content": reply.text or None, "tool_calls": calls}
        if reply.thinking:
            message["reasoning_content"] = reply.thinking
        choices = [_choice({"message": message}, end.finish)]
        body = {**self._common, "object": "chat.completion", "choices": choices}
        return body | {"usage": end.usage, "sirchat": end.memory}

    def first_events(self) -> Iterable[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def part_events(self, part: ReplyText) -> Iterable[str]:
        delta: dict[str, Any] = {}
        if part.text:
            delta["content"] = part.text
        if part.thinking:
            delta["reasoning_content"] = part.thinking
        if part.calls:
            delta["tool_calls"] = [
                {"index": number, **call.message()}
                for number, call in enumerate(part.calls, self._sent_calls)
            ]
        self._sent_calls += len(part.calls)
        if delta:
            about: dict[str, Any] = {"sirchat": {"id": part.conversation}}
            yield self._chunk(delta, **({} if self._has_sent_id else about))
            self._has_sent_id = True

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        yield self._chunk({}, end.finish, sirchat=end.memory)
        if self._includes_usage:
            yield self._event(choices=[], usage=end.usage)
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        usage = {"usage": None} if self._includes_usage else {}
        return self._event(choices=[_choice({"delta": delta}, finish)], **usage, **more)

    def _event(self, **fields: Any) -> str:
        return server_sent_event({**self._common, "object": "chat.completion.chunk", **fields})


def _choice(content: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish}
