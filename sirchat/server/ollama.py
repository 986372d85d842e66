"""Ollama's chat API: converts its requests to chat requests, and makes the JSON of replies.

A reply is one JSON object, or a stream with one JSON object per line.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sirchat.server.completions import Parts, collected
from sirchat.server.replies import ReplyEnd
from sirchat.server.requests import (
    MANY,
    MOST_MESSAGES,
    ChatRequest,
    MemorySettings,
    RequestError,
    checked,
)
from sirchat.server.tool_fields import CallId, Fields, Json, Name, Tool
from sirchat.server.tools import ToolCall, call_id

VERSION = "0.12.0"
"""The version of Ollama that the server reports to clients; the server has its chat API."""


def _endless(number: Any) -> Any:
    return MANY if number == -1 else number


class OllamaOptions(Fields):
    """The field `options` of a request: sampling settings and other settings, by Ollama's names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    repeat_penalty: float | None = None
    num_predict: Annotated[int | None, BeforeValidator(_endless), Field(ge=1, le=MANY)] = None
    num_ctx: int | None = None

    def settings(self) -> dict[str, Any]:
        """The options as fields of an OpenAI chat request, by OpenAI's names; without `num_ctx`."""
        given = self.model_dump(exclude_none=True, exclude={"num_ctx"})
        renamed = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
        return {renamed.get(name, name): value for name, value in given.items()}


class OllamaFunction(Fields):
    """The field `function` of a tool call: the tool's name, and the arguments of the call.

    The field `index` is ignored.
    """

    index: int | None = None
    name: Name
    arguments: Json = Field(default={})


class OllamaCall(Fields):
    """A tool call in a message.

    If the call has no id, the result of the tool is found by the order of calls and the tool's
    name.
    """

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaMessage(Fields):
    """One message in the field `messages` of a request for a reply."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[OllamaCall] = Field(default=[])
    tool_name: Name | None = None
    tool_call_id: CallId | None = None


class OllamaRequest(Fields):
    """The body of a request to `/api/chat`, Ollama's endpoint for a reply in a chat."""

    model: str
    messages: list[OllamaMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: list[Tool] = Field(default=[])
    options: OllamaOptions = OllamaOptions()
    format: Literal["json"] | Json | None = None
    stream: bool = True
    sirchat: MemorySettings = MemorySettings()

    def chat(self) -> ChatRequest:
        """Convert this request to a request of OpenAI's chat API; `num_ctx` becomes the budget.

        Raises RequestError if a value is not allowed.
        """
        budget, own = self.options.num_ctx, self.sirchat
        if budget is not None and own.budget not in (None, budget):
            raise RequestError("num_ctx and sirchat.budget differ; give one of them")
        fields: dict[str, Any] = {
            "model": self.model.removesuffix(":latest"),
            "messages": list(self._messages()),
            "tools": self.tools,
            "stream": self.stream,
            "sirchat": own if budget is None else own.model_copy(update={"budget": budget}),
        }
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return checked(ChatRequest, fields | self.options.settings())

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages as dictionaries, in the form of OpenAI's chat request.

        OpenAI's form needs an id for each tool call, and the same id for the tool's result. Ids
        that are missing in Ollama's request are added.
        """
        ids, waiting = map(call_id, count()), list[tuple[str, str]]()
        for one in self.messages:
            fields: dict[str, Any] = {"role": one.role, "content": one.content, "tool_calls": []}
            for call in one.tool_calls:
                ident, name = call.id or next(ids), call.function.name
                function = {"name": name, "arguments": json.dumps(call.function.arguments)}
                fields["tool_calls"].append({"id": ident, "function": function})
                waiting.append((name, ident))
            if one.role == "tool":
                fits = [pair for pair in waiting if one.tool_name in (None, pair[0])]
                waiting = [pair for pair in waiting if pair not in fits[:1]]
                answered = one.tool_call_id or next((ident for _, ident in fits), "none")
                fields |= {"tool_call_id": answered, "name": one.tool_name}
            yield fields


class OllamaShape:
    """Makes the JSON of one reply in Ollama's format: one object, or one object per line."""

    media = "application/x-ndjson"

    def __init__(self, model: str) -> None:
        self._model = model
        self._begun = time.monotonic_ns()

    async def whole(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the whole response."""
        first = time.monotonic_ns()
        text, said, end = await collected(parts)
        calls = [call for one in said for call in one.calls]
        return self._piece(text, calls) | self._end(end, first)

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the lines of the streamed response, while the reply is generated.

        Each line is a JSON object.
        """
        first = time.monotonic_ns()
        try:
            async for part in parts:
                if isinstance(part, ReplyEnd):
                    yield _line(self._piece("") | self._end(part, first))
                elif part.text or part.calls:
                    yield _line(self._piece(part.text, part.calls))
        except RequestError as error:
            yield _line(error.body)

    def _piece(self, text: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [_shown(call) for call in calls]
        now = datetime.now(UTC).isoformat()
        return {"model": self._model, "created_at": now, "message": message, "done": False}

    def _end(self, end: ReplyEnd, first: int) -> dict[str, Any]:
        """The fields that only the last JSON object of a reply has, such as token counts.

        `first` is the time, in ns, when the first part of the reply was generated. Durations are in
        ns.
        """
        now = time.monotonic_ns()
        return {
            "done": True,
            "done_reason": "length" if end.finish == "length" else "stop",
            "total_duration": now - self._begun,
            "prompt_eval_count": end.usage["prompt_tokens"],
            "prompt_eval_duration": first - self._begun,
            "eval_count": end.usage["completion_tokens"],
            "eval_duration": now - first,
            "sirchat": end.memory,
        }


def _shown(call: ToolCall) -> dict[str, Any]:
    try:
        given = json.loads(call.arguments)
    except ValueError:
        given = {}
    arguments = given if isinstance(given, dict) else {}
    return {"function": {"name": call.name, "arguments": arguments}}


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
