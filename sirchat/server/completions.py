"""The JSON of replies in the shapes of OpenAI's chat completions and text completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest, ReplyRequest, RequestError

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


async def collect_reply(parts: Parts) -> tuple[ReplyText, ReplyEnd]:
    """Wait for all parts of a reply; returns its texts, joined to one, and its end."""
    *said, end = [part async for part in parts]
    pieces = [part for part in said if isinstance(part, ReplyText)]
    assert isinstance(end, ReplyEnd)
    whole = ReplyText(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(call for piece in pieces for call in piece.calls),
        "".join(piece.thinking for piece in pieces),
    )
    return whole, end


def server_sent_event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event with `content` as JSON; `name` is its type, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class CompletionShape:
    """A reply in the shape of OpenAI's chat completions, or of its text completions."""

    media = "text/event-stream"

    def __init__(self, asked: ReplyRequest, model: str) -> None:
        self._is_chat = isinstance(asked, ChatRequest)
        self._has_logprobs = isinstance(asked, ChatRequest) and asked.logprobs
        self._usage = asked.stream_options.include_usage
        self._kind, prefix = "text_completion", "cmpl"
        if self._is_chat:
            self._kind, prefix = "chat.completion", "chatcmpl"
        ident = f"{prefix}-{secrets.token_hex(12)}"
        self._common = {"id": ident, "created": int(time.time()), "model": model}
        self._calls = 0  # number of calls sent so far

    async def whole_response(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the response."""
        said, end = await collect_reply(parts)
        fields: dict[str, Any] = {"text": said.text}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": said.text}
            if said.calls:
                calls = [call.message() for call in said.calls]
                message |= {"content": said.text or None, "tool_calls": calls}
            if said.thinking:
                message["reasoning_content"] = said.thinking
            fields = {"message": message}
        return {
            **self._common,
            "object": self._kind,
            "choices": [self._choice(fields, self._logprobs(said), end.finish)],
            "usage": end.usage,
            "sirchat": end.memory,
        }

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the server-sent events of the reply, while it is generated."""
        if self._is_chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        try:
            async for part in parts:
                if isinstance(part, ReplyEnd):
                    fields: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
                    yield self._chunk(fields, finish=part.finish, sirchat=part.memory)
                    if self._usage:
                        yield self._event(choices=[], usage=part.usage)
                elif part != ReplyText(""):
                    yield self._chunk(self._piece(part), self._logprobs(part))
        except RequestError as error:
            yield server_sent_event(error.body)
            return
        yield "data: [DONE]\n\n"

    def _piece(self, said: ReplyText) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": said.text}
        others = said.calls or said.thinking
        delta: dict[str, Any] = {"content": said.text} if said.text or not others else {}
        if said.thinking:
            delta["reasoning_content"] = said.thinking
        if said.calls:
            delta["tool_calls"] = [
                {"index": number, **call.message()}
                for number, call in enumerate(said.calls, self._calls)
            ]
        self._calls += len(said.calls)
        return {"delta": delta}

    def _logprobs(self, said: ReplyText) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in said.tokens
        ]
        return {"content": tokens, "refusal": None}

    def _choice(self, fields: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, **fields, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(
        self, fields: dict[str, Any], logprobs: Any = None, finish: str | None = None, **more: Any
    ) -> str:
        usage = {"usage": None} if self._usage else {}
        return self._event(choices=[self._choice(fields, logprobs, finish)], **usage, **more)

    def _event(self, **fields: Any) -> str:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return server_sent_event({**self._common, "object": kind, **fields})
