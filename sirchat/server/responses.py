"""OpenAI's responses API: a request has new messages, and names the response that it continues.

The reply is that of a chat completion with all messages up to this response and the new ones.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sirchat.errors import format_value
from sirchat.server.completions import Parts, collected, event
from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.requests import (
    MANY,
    MOST_MESSAGES,
    CallFields,
    CallId,
    ChatMessage,
    ChatRequest,
    Fields,
    FunctionCall,
    FunctionFields,
    Json,
    MemorySettings,
    Name,
    RequestError,
    ToolName,
    checked,
    joined,
)
from sirchat.server.tools import ToolCall

_MOST_KEPT = 1000  # responses
_MOST_CHARACTERS = 2**26  # in all responses that are kept
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "sirchat")

_Content = Annotated[
    str,
    BeforeValidator(
        partial(
            joined, kinds=("input_text", "output_text"), extra=("annotations", "logprobs", "parsed")
        )
    ),
]


class _Item(Fields):
    """What items of the field `input` share: clients send back items of earlier responses."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item):
    """A message in the field `input` of a request."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content

    def message(self) -> ChatMessage:
        """As a message of a chat request."""
        return ChatMessage(role=self.role, content=self.content)  # type: ignore[arg-type]


class CalledFunction(_Item):
    """A tool call in the field `input` of a request."""

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str
    parsed_arguments: Any = None

    def message(self) -> ChatMessage:
        """As a message of a chat request."""
        return _reply("", [ToolCall(self.call_id, self.name, self.arguments)])


class FunctionOutput(_Item):
    """The result of one tool call, in the field `input` of a request."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content

    def message(self) -> ChatMessage:
        """As a message of a chat request."""
        return ChatMessage(role="tool", content=self.output, tool_call_id=self.call_id)


class FunctionTool(FunctionFields):
    """A function that the model may call; its name and parameters are fields beside `type`."""

    type: Literal["function"]

    def tool(self) -> dict[str, Any]:
        """As a tool of a chat request."""
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedFunction(ToolName):
    """The field `tool_choice`, if it names the tool that the reply must call."""

    type: Literal["function"]


class TextFormat(Fields):
    """The format of a reply; in a chat request, all but `type` is inside `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class TextOptions(Fields):
    """The field `text` of a request: an object with the format of the reply."""

    format: TextFormat = TextFormat()

    def response_format(self) -> dict[str, Any]:
        """As the field `response_format` of a chat request."""
        given = self.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.format.type} | ({"json_schema": given} if given else {})


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


_Items = list[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[CalledFunction, Tag("function_call")]
        | Annotated[FunctionOutput, Tag("function_call_output")],
        Discriminator(_kind),
    ]
]


class ResponsesRequest(Fields):
    """The body of a request to `/v1/responses`."""

    input: Annotated[
        _Items,
        BeforeValidator(
            lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given
        ),
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
    tools: list[FunctionTool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    sirchat: MemorySettings = MemorySettings()

    def chat(self, before: list[ChatMessage]) -> ChatRequest:
        """As a chat request, after the messages `before`; RequestError if it can't be answered."""
        messages = [*before, *_messages(self.input)]
        if self.instructions is not None:
            if messages[0].role == "system":
                raise RequestError(
                    "instructions and a system message can't both be given", param="instructions"
                )
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        choice: Any = self.tool_choice
        if not isinstance(choice, str):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields = {name: getattr(self, name) for name in _SAME} | {
            "messages": messages,
            "tools": [tool.tool() for tool in self.tools],
            "tool_choice": choice,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.response_format(),
        }
        return checked(ChatRequest, fields)


class KeptResponses:
    """The messages up to each earlier response, by its id; the oldest are dropped."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[ChatMessage], int]] = OrderedDict()
        self._size = 0

    def add(self, ident: str, before: list[ChatMessage], new: list[ChatMessage]) -> None:
        """Keep a response: the messages `before` its request, and those of request and reply."""
        texts = [message.text for message in new]  # those of earlier messages are shared
        texts += [call.function.arguments for message in new for call in message.tool_calls]
        size = sum(map(len, texts))
        self._kept[ident] = [*before, *new], size
        self._size += size
        while len(self._kept) > _MOST_KEPT or self._size > _MOST_CHARACTERS:
            self._size -= self._kept.popitem(last=False)[1][1]

    def messages(self, ident: str | None) -> list[ChatMessage]:
        """All messages up to a response, [] for None; RequestError if it is not kept."""
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
    """The JSON of one response, whole or as events; it is kept if the request says so."""

    media = "text/event-stream"

    def __init__(
        self, asked: ResponsesRequest, before: list[ChatMessage], model: str, kept: KeptResponses
    ) -> None:
        self._asked, self._before, self._kept = asked, before, kept
        self._id, self._message_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self._number = 0  # of the next event
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
            "parallel_tool_calls": asked.parallel_tool_calls,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": asked.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in asked.tools],
            "truncation": "auto",
            "usage": None,
        }

    async def whole(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the whole response."""
        said, end = await collected(parts)
        items = [self._message(_status(end), said.text)] if said.text or not said.calls else []
        return self._done([*items, *map(_call, said.calls)], said, end)

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the server-sent events of the response, while it is generated."""
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        text, calls, items = "", list[ToolCall](), list[dict[str, Any]]()
        at: dict[str, Any] = {}  # the place of the text, once there is some
        try:
            async for part in parts:
                if isinstance(part, ReplyEnd):
                    end = part
                    break
                if part.text:
                    if not at:
                        at = self._place(items)
                        for told in self._opened(at, items[-1]):
                            yield told
                    text += part.text
                    yield self._event(
                        "response.output_text.delta", **at, delta=part.text, logprobs=[]
                    )
                for call in part.calls:
                    calls.append(call)
                    items.append(_call(call))
                    for told in self._called(len(items) - 1, items[-1]):
                        yield told
        except RequestError as error:
            problem = error.body["error"]
            failed = {"code": problem["code"] or "server_error", "message": problem["message"]}
            response = self._response("failed", []) | {"error": failed}
            yield self._event("response.failed", response=response)
            return
        if not items:  # the reply is empty
            at = self._place(items)
            for told in self._opened(at, items[-1]):
                yield told
        if at:
            items[at["output_index"]] = message = self._message(_status(end), text)
            for told in self._closed(at, message):
                yield told
        response = self._done(items, ReplyText(text, calls=tuple(calls)), end)
        yield self._event(f"response.{response['status']}", response=response)

    def _place(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Append an empty message to `items`; the fields by which events name it and its text."""
        items.append(self._message("in_progress"))
        return {"item_id": self._message_id, "output_index": len(items) - 1, "content_index": 0}

    def _opened(self, at: dict[str, Any], item: dict[str, Any]) -> Iterator[str]:
        yield self._event("response.output_item.added", output_index=at["output_index"], item=item)
        yield self._event("response.content_part.added", **at, part=_text(""))

    def _closed(self, at: dict[str, Any], item: dict[str, Any]) -> Iterator[str]:
        (part,) = item["content"]
        yield self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _called(self, index: int, item: dict[str, Any]) -> Iterator[str]:
        at = {"item_id": item["id"], "output_index": index}
        begun, kind = item | {"arguments": "", "status": "in_progress"}, "function_call_arguments"
        told = {"arguments": item["arguments"], "name": item["name"]}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"response.{kind}.delta", **at, delta=item["arguments"])
        yield self._event(f"response.{kind}.done", **at, **told)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _done(self, output: list[dict[str, Any]], said: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        """The JSON object of the complete response, which is kept for later requests."""
        if self._asked.store:
            new = [*_messages(self._asked.input), _reply(said.text, said.calls)]
            self._kept.add(self._id, self._before, new)
        status = _status(end)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        more = {"usage": _usage(end.usage), "incomplete_details": cut, "sirchat": end.memory}
        return self._response(status, output) | more

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "status": status, "output": output}

    def _message(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_text(text)]
        item = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> str:
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(numbered, kind)


def _messages(items: Iterable[InputMessage | CalledFunction | FunctionOutput]) -> list[ChatMessage]:
    """Items as messages of a chat request; a reply's text and its calls become one message."""
    messages: list[ChatMessage] = []
    for message in (item.message() for item in items):
        if message.tool_calls and messages and messages[-1].role == "assistant":
            calls = [*messages[-1].tool_calls, *message.tool_calls]
            messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
        else:
            messages.append(message)
    return messages


def _reply(text: str, calls: Iterable[ToolCall]) -> ChatMessage:
    fields = [
        CallFields(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in calls
    ]
    content = None if fields and not text else text
    return ChatMessage(role="assistant", content=content, tool_calls=fields)


def _status(end: ReplyEnd) -> str:
    return "incomplete" if end.finish == "length" else "completed"


def _call(call: ToolCall) -> dict[str, Any]:
    called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    item = {"id": f"fc_{secrets.token_hex(24)}", "type": "function_call", "status": "completed"}
    return item | called


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
