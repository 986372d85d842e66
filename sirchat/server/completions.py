"""How a reply is told: what all APIs have in common, and the shape of OpenAI's completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

from sirchat.server.fields import RequestError
from sirchat.server.parts import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


class ReplySerializer:
    """How an API tells a reply: whole as one JSON object, or as a stream of events."""

    media = "text/event-stream"

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
                for event in (
                    self.last_events(part) if isinstance(part, ReplyEnd) else self.part_events(part)
                ):
                    yield event
        except RequestError as error:
            for event in self.error_events(error):
                yield event

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with this reply, in one part."""
        raise NotImplementedError

    def first_events(self) -> Iterable[str]:
        """The first events."""
        raise NotImplementedError

    def part_events(self, part: ReplyText) -> Iterable[str]:
        """The events that tell a part."""
        raise NotImplementedError

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        """The last events."""
        raise NotImplementedError

    def error_events(self, error: RequestError) -> Iterable[str]:
        """The last events, if the reply fails."""
        return (server_sent_event(error.body),)


def server_sent_event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event with `content` as JSON; `name` is its type, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class ChatCompletionSerializer(ReplySerializer):
    """A reply in the shape of OpenAI's chat completions."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._includes_usage = request.stream_options.include_usage
        reply_id = f"chatcmpl-{secrets.token_hex(12)}"
        self._common = {"id": reply_id, "created": int(time.time()), "model": model}
        self._sent_calls = 0  # number of calls sent so far

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with this reply, in one part."""
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
        """The first event: a message without text."""
        yield self._chunk({"role": "assistant", "content": ""})

    def part_events(self, part: ReplyText) -> Iterable[str]:
        """The event that tells a part."""
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
            yield self._chunk(delta)

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        """The last events."""
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
