"""Ollama's API for replies: requests become chat requests; replies are one or more JSON objects."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal

from pydantic import Field

from sirchat.server.fields import (
    MAX_MESSAGES,
    MAX_TOKEN_LIMIT,
    CallId,
    Json,
    Name,
    Options,
    RequestBody,
    RequestError,
    RequestObject,
    make_request,
)
from sirchat.server.parts import ReplyEnd, ReplyText
from sirchat.server.requests import (
    Arguments,
    ChatRequest,
    ConversationFields,
    FunctionCall,
    SamplingFields,
    Tool,
    schema_format,
    shared_fields,
)
from sirchat.server.streaming import ReplySerializer
from sirchat.text.tool_calls import call_id


class OllamaOptions(SamplingFields, Options):
    """The field `options` of a request: sampling and other settings, by Ollama's names."""

    num_predict: int | None = Field(default=None, ge=1, le=MAX_TOKEN_LIMIT)


class OllamaFunction(FunctionCall):
    """The field `function` of a tool call; it may lack arguments."""

    arguments: Arguments = "{}"


class OllamaCall(RequestObject):
    """A tool call in a message; without an id, its result is found by order and by name."""

    id: CallId | None = None
    function: OllamaFunction


class OllamaMessage(RequestObject):
    """One message in the field `messages` of a request for a reply."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[OllamaCall] = Field(default=[])
    tool_name: Name | None = None
    tool_call_id: CallId | None = None


class OllamaRequest(RequestBody):
    """The body of a request to `/api/chat`."""

    model: str
    messages: list[OllamaMessage] = Field(max_length=MAX_MESSAGES)  # none: it only loads
    tools: list[Tool] = Field(default=[])
    options: OllamaOptions = OllamaOptions()
    format: Literal["json"] | Json | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    stream: bool = True
    sirchat: ConversationFields = ConversationFields()

    def as_chat_request(self) -> ChatRequest:
        """This request in OpenAI's form; raises RequestError if a value is not allowed."""
        is_switch = isinstance(self.think, bool)
        fields = shared_fields(self) | {
            "stream": self.stream,
            "messages": list(self._messages()),
            "reasoning_effort": ("on" if self.think else "none") if is_switch else self.think,
        }
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            fields["response_format"] = schema_format(self.format)
        option_names = set(OllamaOptions.model_fields)
        options = self.options.model_dump(include=option_names, exclude_unset=True)
        fields["max_tokens"] = options.pop("num_predict", None)
        return make_request(ChatRequest, fields | options)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of a chat request; each call and each result gets an id."""
        ids, unanswered = map(call_id, count()), list[tuple[str, str]]()  # of calls: name and id
        for message in self.messages:
            fields: dict[str, Any] = {"role": message.role, "content": message.content}
            fields["tool_calls"] = []
            for call in message.tool_calls:
                ident = call.id or next(ids)
                fields["tool_calls"].append({"id": ident, "function": call.function})
                unanswered.append((call.function.name, ident))
            if message.role == "tool":
                candidates = [pair for pair in unanswered if message.tool_name in (None, pair[0])]
                unanswered = [pair for pair in unanswered if pair not in candidates[:1]]
                first_id = next((ident for _, ident in candidates), "none")
                fields["tool_call_id"] = message.tool_call_id or first_id
                fields["name"] = message.tool_name
            yield fields


class OllamaSerializer(ReplySerializer):
    """The JSON of one reply in Ollama's format: one object, or one object per line."""

    media = "application/x-ndjson"

    def __init__(self, model: str) -> None:
        self._model = model
        self._began_at = time.monotonic_ns()

    def loaded_body(self) -> dict[str, Any]:
        """The response to a request without messages, which only loads the model."""
        return self._reply_body(ReplyText("")) | {"done": True, "done_reason": "load"}

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        return self._reply_body(reply) | self._end_fields(end)

    def first_events(self) -> Iterable[str]:
        return ()

    def part_events(self, part: ReplyText) -> Iterable[str]:
        return (_line(self._reply_body(part)),) if part != ReplyText("") else ()

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        return (_line(self._reply_body(ReplyText("")) | self._end_fields(end)),)

    def error_events(self, error: RequestError) -> Iterable[str]:
        return (_line(error.body_for("/api/")),)

    def _reply_body(self, part: ReplyText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            functions = ({"name": c.name, "arguments": json.loads(c.arguments)} for c in part.calls)
            message["tool_calls"] = [{"function": function} for function in functions]
        now = datetime.now(UTC).isoformat()
        return {"model": self._model, "created_at": now, "message": message, "done": False}

    def _end_fields(self, end: ReplyEnd) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": "length" if end.finish == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._began_at,
            "prompt_eval_count": end.usage["prompt_tokens"],
            "eval_count": end.usage["completion_tokens"],
            "sirchat": end.memory,
        }


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
