"""The JSON of replies in the shapes of OpenAI's chat completions and text completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Protocol

from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest, ReplyRequest, RequestError

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


class Shape(Protocol):
    """Makes the JSON of one reply, whole or as a stream of the type `media`."""

    media: str

    async def whole(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the response."""

    def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the text of the streamed response while the reply is generated."""


async def collected(parts: Parts) -> tuple[ReplyText, ReplyEnd]:
    """Wait for all parts of a reply; returns its texts, joined to one, and its end."""
    *said, end = [part async for part in parts]
    pieces = [part for part in said if isinstance(part, ReplyText)]
    assert isinstance(end, ReplyEnd)
    whole = ReplyText(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(call for piece in pieces for call in piece.calls),
    )
    return whole, end


def event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event with `content` as JSON; `name` is its type, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _Completion:
    """All fields of a reply around those of its `choice`, which subclasses make."""

    media = "text/event-stream"
    kind, prefix, chunk_kind = "", "", ""

    def __init__(self, asked: ReplyRequest, model: str) -> None:
        self._usage = asked.stream_options.include_usage
        ident = f"{self.prefix}-{secrets.token_hex(12)}"
        self._common = {"id": ident, "created": int(time.time()), "model": model}

    async def whole(self, parts: Parts) -> dict[str, Any]:
        said, end = await collected(parts)
        choice = {"index": 0, **self._whole(said), "finish_reason": end.finish}
        return {
            **self._common,
            "object": self.kind,
            "choices": [choice],
            "usage": end.usage,
            "sirchat": end.memory,
        }

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        for fields in self._opening():
            yield self._chunk(fields)
        try:
            async for part in parts:
                if isinstance(part, ReplyEnd):
                    yield self._chunk(self._end(), part.finish, sirchat=part.memory)
                    if self._usage:
                        yield self._event(choices=[], usage=part.usage)
                elif part.text or part.tokens or part.calls:
                    yield self._chunk(self._piece(part))
        except RequestError as error:
            yield event(error.body)
            return
        yield "data: [DONE]\n\n"

    def _whole(self, said: ReplyText) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self) -> list[dict[str, Any]]:
        return []

    def _piece(self, said: ReplyText) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, fields: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        usage = {"usage": None} if self._usage else {}
        choice = {"index": 0, **fields, "finish_reason": finish}
        return self._event(choices=[choice], **usage, **more)

    def _event(self, **fields: Any) -> str:
        return event({**self._common, "object": self.chunk_kind, **fields})


class ChatShape(_Completion):
    """A reply in the shape of OpenAI's chat completions."""

    kind, prefix, chunk_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, model: str) -> None:
        super().__init__(asked, model)
        self._has_logprobs = asked.logprobs
        self._calls = 0  # number of calls sent so far

    def _whole(self, said: ReplyText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.calls:
            calls = [call.message() for call in said.calls]
            message |= {"content": said.text or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(said)}

    def _opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def _piece(self, said: ReplyText) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": said.text} if said.text or not said.calls else {}
        if said.calls:
            delta["tool_calls"] = [
                {"index": number, **call.message()}
                for number, call in enumerate(said.calls, self._calls)
            ]
        self._calls += len(said.calls)
        return {"delta": delta, "logprobs": self._logprobs(said)}

    def _end(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, said: ReplyText) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in said.tokens
        ]
        return {"content": tokens, "refusal": None}


class TextShape(_Completion):
    """A continued text in the shape of OpenAI's text completions."""

    kind, prefix, chunk_kind = "text_completion", "cmpl", "text_completion"

    def _whole(self, said: ReplyText) -> dict[str, Any]:
        return {"text": said.text, "logprobs": None}

    _piece = _whole

    def _end(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}
