"""Ollama's chat: its requests, and its replies, whole or as one JSON object a line."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sirchat.server.completions import Next, Part
from sirchat.server.replies import ReplyEnd
from sirchat.server.requests import (
    MANY,
    MOST_MESSAGES,
    ChatMessage,
    ChatRequest,
    Fields,
    Json,
    MemorySettings,
    RequestError,
    checked,
)

VERSION = "0.12.0"
"""The version of Ollama whose interface this is."""


def _endless(number: Any) -> Any:
    return MANY if number == -1 else number


class OllamaOptions(Fields):
    """The options of a request, by Ollama's names."""

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
        """The same options as fields of a request for a chat."""
        given = self.model_dump(exclude_none=True, exclude={"num_ctx"})
        renamed = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
        return {renamed.get(name, name): value for name, value in given.items()}


class OllamaRequest(Fields):
    """A request for a reply in a chat."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    options: OllamaOptions = OllamaOptions()
    format: Literal["json"] | Json | None = None
    stream: bool = True
    sirchat: MemorySettings = MemorySettings()

    def chat(self) -> ChatRequest:
        """The same request in the shape of OpenAI's; `num_ctx` is the budget."""
        budget, own = self.options.num_ctx, self.sirchat
        if budget is not None and own.budget not in (None, budget):
            raise RequestError("num_ctx and sirchat.budget differ; give one of them")
        fields: dict[str, Any] = {
            "model": self.model.removesuffix(":latest"),
            "messages": self.messages,
            "stream": self.stream,
            "sirchat": own if budget is None else own.model_copy(update={"budget": budget}),
        }
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return checked(ChatRequest, fields | self.options.settings())


class OllamaShape:
    """The JSON of one reply, whole or in pieces."""

    media = "application/x-ndjson"

    def __init__(self, model: str) -> None:
        self._model = model
        self._begun = time.monotonic_ns()

    async def whole(self, part: Part, following: Next) -> dict[str, Any]:
        """The JSON of the whole reply, whose first part is `part`."""
        text, first = "", time.monotonic_ns()
        while not isinstance(part, ReplyEnd):
            text += part.text
            part = await following()
        return self._piece(text) | self._end(part, first)

    async def events(self, part: Part, following: Next) -> AsyncIterator[str]:
        """The lines of a stream, whose first part is `part`."""
        first = time.monotonic_ns()
        try:
            while not isinstance(part, ReplyEnd):
                if part.text:
                    yield _line(self._piece(part.text))
                part = await following()
        except RequestError as error:
            yield _line(error.body)
            return
        yield _line(self._piece("") | self._end(part, first))

    def _piece(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        now = datetime.now(UTC).isoformat()
        return {"model": self._model, "created_at": now, "message": message, "done": False}

    def _end(self, end: ReplyEnd, first: int) -> dict[str, Any]:
        """The fields of the last piece; `first` is the time of the first one, in ns."""
        now = time.monotonic_ns()
        return {
            "done": True,
            "done_reason": end.finish,
            "total_duration": now - self._begun,
            "prompt_eval_count": end.usage["prompt_tokens"],
            "prompt_eval_duration": first - self._begun,
            "eval_count": end.usage["completion_tokens"],
            "eval_duration": now - first,
            "sirchat": end.memory,
        }


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
