"""Makes the JSON of replies in the formats of OpenAI's chat completions and text completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Protocol

from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest, ReplyRequest, RequestError

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]
"""The parts of a reply in order, the last of which is a `ReplyEnd`.

Iterating over the parts raises RequestError if the reply fails.
"""


class Shape(Protocol):
    """Interface of the classes that make the JSON of one reply, in one piece or as a stream.

    Attributes:
        media: the media type of the stream, such as `text/event-stream`.
    """

    media: str

    async def whole(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the whole response."""

    def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the text of the streamed response, piece by piece, while the reply is generated."""


async def collected(parts: Parts) -> tuple[str, list[ReplyText], ReplyEnd]:
    """Wait for all parts of a reply; returns its whole text, its `ReplyText` parts, and its end."""
    *said, end = [part async for part in parts]
    pieces = [part for part in said if isinstance(part, ReplyText)]
    assert isinstance(end, ReplyEnd)
    return "".join(part.text for part in pieces), pieces, end


class _Completion:
    """Base class of `ChatShape` and `TextShape`, which make the JSON of a reply.

    OpenAI's formats have the reply's text in an object called `choice`. Subclasses make the fields
    of this object; this class makes all fields around it.
    """

    media = "text/event-stream"
    kind, prefix, chunk_kind = "", "", ""

    def __init__(self, asked: ReplyRequest, model: str) -> None:
        self._usage = asked.stream_options.include_usage
        ident = f"{self.prefix}-{secrets.token_hex(12)}"
        self._common = {"id": ident, "created": int(time.time()), "model": model}

    def _whole(self, text: str, said: list[ReplyText]) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, said: ReplyText | None) -> dict[str, Any]:
        """The fields of a streamed `choice` for one part of the reply.

        `said` is this part; None stands for the end of the reply.
        """
        raise NotImplementedError

    def _opening(self) -> list[dict[str, Any]]:
        """The fields of each `choice` that is streamed before the reply.

        By default, this is an empty list: nothing is streamed before the reply.
        """
        return []

    async def whole(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the whole response."""
        text, said, end = await collected(parts)
        choice = {"index": 0, **self._whole(text, said), "finish_reason": end.finish}
        return {
            **self._common,
            "object": self.kind,
            "choices": [choice],
            "usage": end.usage,
            "sirchat": end.memory,
        }

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the server-sent events of the reply, while it is generated."""
        for fields in self._opening():
            yield self._chunk(fields)
        try:
            async for part in parts:
                if isinstance(part, ReplyEnd):
                    yield self._chunk(self._piece(None), part.finish, sirchat=part.memory)
                    if self._usage:
                        yield self._event(choices=[], usage=part.usage)
                elif part.text or part.tokens or part.calls:
                    yield self._chunk(self._piece(part))
        except RequestError as error:
            yield event(error.body)
            return
        yield "data: [DONE]\n\n"

    def _chunk(self, fields: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        usage = {"usage": None} if self._usage else {}
        choice = {"index": 0, **fields, "finish_reason": finish}
        return self._event(choices=[choice], **usage, **more)

    def _event(self, **fields: Any) -> str:
        return event({**self._common, "object": self.chunk_kind, **fields})


class ChatShape(_Completion):
    """Makes the JSON of a reply in the format of OpenAI's chat completions."""

    kind, prefix, chunk_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, model: str) -> None:
        super().__init__(asked, model)
        self._has_logprobs = asked.logprobs
        self._calls = 0  # number of calls sent so far

    def _whole(self, text: str, said: list[ReplyText]) -> dict[str, Any]:
        calls = [call.message() for one in said for call in one.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(*said)}

    def _opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def _piece(self, said: ReplyText | None) -> dict[str, Any]:
        if said is None:
            return {"delta": {}, "logprobs": None}
        calls = [
            {"index": self._calls + number, **call.message()}
            for number, call in enumerate(said.calls)
        ]
        self._calls += len(calls)
        delta = ({"content": said.text} if said.text or not calls else {}) | (
            {"tool_calls": calls} if calls else {}
        )
        return {"delta": delta, "logprobs": self._logprobs(said)}

    def _logprobs(self, *said: ReplyText) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for part in said
            for text, value in part.tokens
        ]
        return {"content": tokens, "refusal": None}


class TextShape(_Completion):
    """Makes the JSON of a reply in the format of OpenAI's text completions.

    There, the reply continues a text that the request gives.
    """

    kind, prefix, chunk_kind = "text_completion", "cmpl", "text_completion"

    def _whole(self, text: str, said: list[ReplyText]) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def _piece(self, said: ReplyText | None) -> dict[str, Any]:
        return {"text": "" if said is None else said.text, "logprobs": None}


def event(content: dict[str, Any], name: str = "") -> str:
    """The text of a server-sent event that has `content` as JSON.

    `name` is the type of the event; "" for an event without a type.
    """
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"
