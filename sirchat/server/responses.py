"""OpenAI's responses: a request names the response that it continues; both are kept here.

Only the new messages come with a request; those before are found by the id of the response that it
continues. The reply is then generated as in a chat completion with all these messages.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sirchat.errors import format_value
from sirchat.server.completions import Next, Part, event
from sirchat.server.replies import ReplyEnd
from sirchat.server.requests import (
    MANY,
    MOST_MESSAGES,
    ChatMessage,
    ChatRequest,
    Fields,
    Json,
    MemorySettings,
    Name,
    RequestError,
    checked,
    joined,
)

_MOST_KEPT = 1000  # responses
_MOST_CHARACTERS = 2**26  # of all responses that are kept

_PARTS = partial(
    joined, kinds=("input_text", "output_text"), extra=("annotations", "logprobs", "parsed")
)


class InputMessage(Fields):
    """A message of the input; also one of an earlier output, as clients send it back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_PARTS)]
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None

    def message(self) -> ChatMessage:
        """The message as one of a chat."""
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role=role, content=self.content)


class TextFormat(Fields):
    """The format of a reply; a schema stands here beside its name."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class TextOptions(Fields):
    """What the text of a reply is to be."""

    format: TextFormat = TextFormat()

    def response_format(self) -> dict[str, Any]:
        """The same format as a chat has it."""
        given = self.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.format.type} | ({"json_schema": given} if given else {})


def _listed(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(Fields):
    """A request for a response."""

    input: Annotated[
        list[InputMessage],
        BeforeValidator(_listed),
        Field(min_length=1, max_length=MOST_MESSAGES),
    ]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MANY)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    store: bool = True
    text: TextOptions = TextOptions()
    sirchat: MemorySettings = MemorySettings()

    def chat(self, before: list[ChatMessage]) -> ChatRequest:
        """The same request for a chat; `before` are the messages that it continues."""
        messages = [*before, *(one.message() for one in self.input)]
        if self.instructions is not None:
            if messages[0].role == "system":
                raise RequestError(
                    "instructions and a system message can't both be given", param="instructions"
                )
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        fields = {name: getattr(self, name) for name in _SAME}
        fields |= {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.response_format(),
        }
        return checked(ChatRequest, fields)


_SAME = ("model", "temperature", "top_p", "stream", "sirchat")


class KeptResponses:
    """The messages up to and with each response, by its id; the oldest are dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[ChatMessage], int]] = OrderedDict()
        self._size = 0

    def add(self, ident: str, before: list[ChatMessage], new: list[ChatMessage]) -> None:
        """Keep a response, which continues `before`."""
        size = sum(len(one.text) for one in new)  # texts of earlier messages are not copied
        self._kept[ident] = [*before, *new], size
        self._size += size
        while len(self._kept) > _MOST_KEPT or self._size > _MOST_CHARACTERS:
            self._size -= self._kept.popitem(last=False)[1][1]

    def messages(self, ident: str | None) -> list[ChatMessage]:
        """The messages up to and with a response; none if `ident` is None."""
        if ident is None:
            return []
        if ident not in self._kept:
            raise RequestError(
                f"there is no response {format_value(ident)}; it may be dropped, or was not stored",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._kept[ident][0]


class ResponsesShape:
    """The JSON of one response, whole or in events; keeps the response, if it is to be stored."""

    media = "text/event-stream"

    def __init__(
        self, asked: ResponsesRequest, before: list[ChatMessage], model: str, kept: KeptResponses
    ) -> None:
        self._asked, self._before, self._kept = asked, before, kept
        self._id, self._item = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self._number = 0
        self._common = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": asked.instructions,
            "previous_response_id": asked.previous_response_id,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "store": asked.store,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": "auto",
            "tools": [],
            "truncation": "auto",
            "usage": None,
        }

    async def whole(self, part: Part, following: Next) -> dict[str, Any]:
        """The JSON of the whole response, whose first part is `part`."""
        text = ""
        while not isinstance(part, ReplyEnd):
            text += part.text
            part = await following()
        return self._done(text, part)

    async def events(self, part: Part, following: Next) -> AsyncIterator[str]:
        """The events of a stream, whose first part is `part`."""
        begun, text = self._response("in_progress", []), ""
        at = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._message())
        yield self._event("response.content_part.added", **at, part=_text(""))
        try:
            while not isinstance(part, ReplyEnd):
                if part.text:
                    text += part.text
                    yield self._event(
                        "response.output_text.delta", **at, delta=part.text, logprobs=[]
                    )
                part = await following()
        except RequestError as error:
            told = error.body["error"]
            failed = {"code": told["code"] or "server_error", "message": told["message"]}
            response = self._response("failed", []) | {"error": failed}
            yield self._event("response.failed", response=response)
            return
        response = self._done(text, part)
        (item,) = response["output"]
        yield self._event("response.output_text.done", **at, text=text, logprobs=[])
        yield self._event("response.content_part.done", **at, part=_text(text))
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def _done(self, text: str, end: ReplyEnd) -> dict[str, Any]:
        """The complete response, which is kept from now on."""
        if self._asked.store:
            new = [one.message() for one in self._asked.input]
            new.append(ChatMessage(role="assistant", content=text))
            self._kept.add(self._id, self._before, new)
        is_cut = end.finish == "length"
        status = "incomplete" if is_cut else "completed"
        more = {
            "usage": _usage(end.usage),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "sirchat": end.memory,
        }
        return self._response(status, [self._message(status, text)]) | more

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "status": status, "output": output}

    def _message(self, status: str = "in_progress", text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_text(text)]
        item = {"id": self._item, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> str:
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(numbered, kind)


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
