"""How a reply is told: what all APIs have in common, and the shape of OpenAI's completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

from sirchat.server.fields import RequestError
from sirchat.server.pieces import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


class Shape:
    """How an API tells a reply: whole as one JSON object, or as a stream of events."""

    media = "text/event-stream"

    async def whole_response(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the response."""
        said = ReplyText("")
        async for part in parts:
            if isinstance(part, ReplyEnd):
                return self.whole(said, part)
            said += part
        raise AssertionError("a reply has an end")

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the events of the streamed response, while the reply is generated."""
        for event in self.begun():
            yield event
        try:
            async for part in parts:
                for event in self.ended(part) if isinstance(part, ReplyEnd) else self.told(part):
                    yield event
        except RequestError as error:
            for event in self.failed(error):
                yield event

    def whole(self, said: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with this reply, in one part."""
        raise NotImplementedError

    def begun(self) -> Iterable[str]:
        """The first events."""
        raise NotImplementedError

    def told(self, part: ReplyText) -> Iterable[str]:
        """The events that tell a part."""
        raise NotImplementedError

    def ended(self, end: ReplyEnd) -> Iterable[str]:
        """The last events."""
        raise NotImplementedError

    def failed(self, error: RequestError) -> Iterable[str]:
        """The last events, if the reply fails."""
        return (server_sent_event(error.body),)


def server_sent_event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event with `content` as JSON; `name` is its type, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class CompletionShape(Shape):
    """A reply in the shape of OpenAI's chat completions."""

    def __init__(self, asked: ChatRequest, model: str) -> None:
        self._usage = asked.stream_options.include_usage
        ident = f"chatcmpl-{secrets.token_hex(12)}"
        self._common = {"id": ident, "created": int(time.time()), "model": model}
        self._calls = 0  # number of calls sent so far

    def whole(self, said: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with this reply, in one part."""
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.calls:
            calls = [call.message() for call in said.calls]
            message |= {"content": said.text or None, "tool_calls": calls}
        if said.thinking:
            message["reasoning_content"] = said.thinking
        choices = [_choice({"message": message}, end.finish)]
        about = {**self._common, "object": "chat.completion", "choices": choices}
        return about | {"usage": end.usage, "sirchat": end.memory}

    def begun(self) -> Iterable[str]:
        """The first event: a message without text."""
        yield self._chunk({"role": "assistant", "content": ""})

    def told(self, part: ReplyText) -> Iterable[str]:
        """The event that tells a part."""
        delta: dict[str, Any] = {}
        if part.text:
            delta["content"] = part.text
        if part.thinking:
            delta["reasoning_content"] = part.thinking
        if part.calls:
            delta["tool_calls"] = [
                {"index": number, **call.message()}
                for number, call in enumerate(part.calls, self._calls)
            ]
        self._calls += len(part.calls)
        if delta:
            yield self._chunk(delta)

    def ended(self, end: ReplyEnd) -> Iterable[str]:
        """The last events."""
        yield self._chunk({}, end.finish, sirchat=end.memory)
        if self._usage:
            yield self._event(choices=[], usage=end.usage)
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        usage = {"usage": None} if self._usage else {}
        return self._event(choices=[_choice({"delta": delta}, finish)], **usage, **more)

    def _event(self, **fields: Any) -> str:
        return server_sent_event({**self._common, "object": "chat.completion.chunk", **fields})


def _choice(said: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish}
