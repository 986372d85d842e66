"""Replies in the form of OpenAI's chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from sirchat.server.fields import Fields
from sirchat.server.parts import ReplyEnd, ReplyText
from sirchat.server.streaming import ReplySerializer, server_sent_event


class ChatCompletionSerializer(ReplySerializer):
    def __init__(self, request: Fields, model: str) -> None:
        self._includes_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        reply_id = f"chatcmpl-{secrets.token_hex(12)}"
        self._common = {"id": reply_id, "created": int(time.time()), "model": model}
        self._sent_calls = 0  # number of calls sent so far

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
            yield self._chunk(delta)

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
