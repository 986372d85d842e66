"""The JSON of replies in the shapes of OpenAI's chat completions and text completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator
from itertools import accumulate, starmap
from typing import Any

from sirchat.server.fields import RequestError
from sirchat.server.pieces import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest, TextRequest

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


async def collect_replies(parts: Parts) -> tuple[list[tuple[ReplyText, str]], ReplyEnd]:
    """Wait for all parts; returns each reply, its texts joined to one, and its finish; the end."""
    *said, end = [part async for part in parts]
    assert isinstance(end, ReplyEnd)
    pieces = [list[ReplyText]() for _ in range(end.choice + 1)]
    for part in said:
        assert isinstance(part, ReplyText)
        pieces[part.choice].append(part)
    replies = list[tuple[ReplyText, str]]()
    for own in pieces:
        whole = ReplyText(
            "".join(piece.text for piece in own),
            tuple(token for piece in own for token in piece.tokens),
            tuple(call for piece in own for call in piece.calls),
            "".join(piece.thinking for piece in own),
        )
        replies.append((whole, "".join(piece.finish for piece in own) or end.finish))
    return replies, end


async def collect_reply(parts: Parts) -> tuple[ReplyText, ReplyEnd]:
    """Wait for all parts of a reply; returns its texts, joined to one, and its end."""
    replies, end = await collect_replies(parts)
    return replies[0][0], end


def server_sent_event(content: dict[str, Any], name: str = "") -> str:
    """A server-sent event with `content` as JSON; `name` is its type, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class CompletionShape:
    """A reply in the shape of OpenAI's chat completions, or of its text completions."""

    media = "text/event-stream"

    def __init__(self, asked: ChatRequest | TextRequest, model: str) -> None:
        self._is_chat = isinstance(asked, ChatRequest)
        self._alternatives = asked.alternatives
        self._usage = asked.stream_options.include_usage
        self._kind, prefix = "text_completion", "cmpl"
        if self._is_chat:
            self._kind, prefix = "chat.completion", "chatcmpl"
        ident = f"{prefix}-{secrets.token_hex(12)}"
        self._common = {"id": ident, "created": int(time.time()), "model": model}
        self._calls = 0  # number of calls sent so far

    async def whole_response(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the response."""
        replies, end = await collect_replies(parts)
        return {
            **self._common,
            "object": self._kind,
            "choices": [
                self._choice(number, self._whole(said), self._logprobs(said), finish)
                for number, (said, finish) in enumerate(replies)
            ],
            "usage": end.usage,
            "sirchat": end.memory,
        }

    def _whole(self, said: ReplyText) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": said.text}
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.calls:
            calls = [call.message() for call in said.calls]
            message |= {"content": said.text or None, "tool_calls": calls}
        if said.thinking:
            message["reasoning_content"] = said.thinking
        return {"message": message}

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the server-sent events of the reply, while it is generated."""
        empty: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        first = {"delta": {"role": "assistant", "content": ""}}
        if self._is_chat:
            yield self._chunk(0, first)
        begun = 0  # the last choice that has begun
        try:
            async for part in parts:
                choice = part.choice
                if self._is_chat and choice > begun:
                    begun, self._calls = choice, 0
                    yield self._chunk(choice, first)
                if isinstance(part, ReplyEnd):
                    yield self._chunk(choice, empty, finish=part.finish, sirchat=part.memory)
                    if self._usage:
                        yield self._event(choices=[], usage=part.usage)
                elif part.finish:
                    yield self._chunk(choice, empty, finish=part.finish)
                elif part != ReplyText("", choice=choice):
                    yield self._chunk(choice, self._piece(part), self._logprobs(part))
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
        if self._alternatives is None:
            return None
        if not self._is_chat:
            ends = accumulate((len(token.text) for token in said.tokens), initial=0)
            likeliest = [dict(token.likeliest) for token in said.tokens]
            return {
                "tokens": [token.text for token in said.tokens],
                "token_logprobs": [token.logprob for token in said.tokens],
                "top_logprobs": likeliest if self._alternatives else None,
                "text_offset": [*ends][:-1],
            }
        content = [
            {
                **_chance(token.text, token.logprob),
                "top_logprobs": list(starmap(_chance, token.likeliest)),
            }
            for token in said.tokens
        ]
        return {"content": content, "refusal": None}

    def _choice(
        self, number: int, fields: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        return {"index": number, **fields, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(
        self,
        number: int,
        fields: dict[str, Any],
        logprobs: Any = None,
        finish: str | None = None,
        **more: Any,
    ) -> str:
        usage = {"usage": None} if self._usage else {}
        return self._event(
            choices=[self._choice(number, fields, logprobs, finish)], **usage, **more
        )

    def _event(self, **fields: Any) -> str:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return server_sent_event({**self._common, "object": kind, **fields})


def _chance(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
