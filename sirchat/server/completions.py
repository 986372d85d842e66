"""The JSON of replies in the shapes of OpenAI's chat completions and text completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from itertools import accumulate, groupby, starmap
from typing import Any

from sirchat.server.fields import RequestError
from sirchat.server.pieces import ReplyEnd, ReplyText
from sirchat.server.requests import ChatRequest, TextRequest

Part = ReplyText | ReplyEnd
Parts = AsyncIterable[Part]  # the last is a `ReplyEnd`; raises RequestError if the reply fails


class Shape:
    """How an API tells a reply: whole as one JSON object, or as a stream of events."""

    media = "text/event-stream"

    async def whole_response(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the response."""
        *said, end = [part async for part in parts]
        assert isinstance(end, ReplyEnd)
        replies = []
        for choice, group in groupby(said, lambda part: part.choice):
            own = [part for part in group if isinstance(part, ReplyText)]
            text, thinking = "".join(p.text for p in own), "".join(p.thinking for p in own)
            tokens = tuple(token for part in own for token in part.tokens)
            calls = tuple(call for part in own for call in part.calls)
            finish = own[-1].finish or end.finish
            replies.append(ReplyText(text, tokens, calls, thinking, choice, finish))
        return self.whole(replies, end)

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

    def whole(self, replies: Sequence[ReplyText], end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with these replies, each in one part."""
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
    """A reply in the shape of OpenAI's chat completions, or of its text completions."""

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
        self._begun = 0  # the last choice that has begun
        self._empty: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}

    def whole(self, replies: Sequence[ReplyText], end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of a response with these replies, each in one part."""
        choices = [
            _choice(said.choice, self._whole(said), self._logprobs(said), said.finish)
            for said in replies
        ]
        about = {**self._common, "object": self._kind, "choices": choices}
        return about | {"usage": end.usage, "sirchat": end.memory}

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

    def begun(self) -> Iterable[str]:
        """The first events: a message without text."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return (self._chunk(_choice(self._begun, first)),) if self._is_chat else ()

    def told(self, part: ReplyText) -> Iterable[str]:
        """The events that tell a part of a choice, perhaps its first or last part."""
        if part.choice > self._begun:
            self._begun, self._calls = part.choice, 0
            yield from self.begun()
        if part.finish:
            yield self._chunk(_choice(part.choice, self._empty, finish=part.finish))
        elif part != ReplyText("", choice=part.choice):
            yield self._chunk(_choice(part.choice, self._piece(part), self._logprobs(part)))

    def ended(self, end: ReplyEnd) -> Iterable[str]:
        """The last events."""
        last = _choice(end.choice, self._empty, finish=end.finish)
        yield self._chunk(last, sirchat=end.memory)
        if self._usage:
            yield self._event(choices=[], usage=end.usage)
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

    def _chunk(self, choice: dict[str, Any], **more: Any) -> str:
        usage = {"usage": None} if self._usage else {}
        return self._event(choices=[choice], **usage, **more)

    def _event(self, **fields: Any) -> str:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return server_sent_event({**self._common, "object": kind, **fields})


def _choice(
    number: int, fields: dict[str, Any], logprobs: Any = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": number, **fields, "logprobs": logprobs, "finish_reason": finish}


def _chance(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
