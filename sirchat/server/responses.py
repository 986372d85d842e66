"""OpenAI's responses API: a request names the response that it continues.

A request has only the new messages. The server has stored the earlier messages, under the id of the
response that the request names. The reply is generated as in a chat completion with the earlier and
the new messages.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from sirchat.errors import format_value
from sirchat.server.completions import Parts, collected, event
from sirchat.server.replies import ReplyEnd
from sirchat.server.requests import (
    MANY,
    MOST_MESSAGES,
    ChatMessage,
    ChatRequest,
    MemorySettings,
    RequestError,
    checked,
    joined,
)
from sirchat.server.tool_fields import (
    CallFields,
    CallId,
    Fields,
    FunctionCall,
    FunctionFields,
    Json,
    Name,
    ToolName,
)
from sirchat.server.tools import ToolCall

_MOST_KEPT = 1000  # responses
_MOST_CHARACTERS = 2**26  # in all responses that are kept

_PARTS = partial(
    joined, kinds=("input_text", "output_text"), extra=("annotations", "logprobs", "parsed")
)


class InputMessage(Fields):
    """A message in the field `input` of a request.

    It may be a message of an earlier response, which clients send back with `id` and `status`.
    """

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_PARTS)]
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None

    def message(self) -> ChatMessage:
        """Convert this message to a message of a chat request."""
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role=role, content=self.content)


class CalledFunction(Fields):
    """A tool call in the field `input` of a request.

    It is a call of an earlier response, which clients send back.
    """

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str
    parsed_arguments: Any = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def message(self) -> ChatMessage:
        """Convert this tool call to a message of the assistant, for a chat request."""
        function = FunctionCall(name=self.name, arguments=self.arguments)
        return ChatMessage(
            role="assistant", tool_calls=[CallFields(id=self.call_id, function=function)]
        )


class FunctionOutput(Fields):
    """The result of one tool call, in the field `input` of a request."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[str, BeforeValidator(_PARTS)]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def message(self) -> ChatMessage:
        """Convert this result to a message with the role `tool`, for a chat request."""
        return ChatMessage(role="tool", content=self.output, tool_call_id=self.call_id)


class FunctionTool(FunctionFields):
    """A function that the model may call; its name and parameters are fields beside `type`."""

    type: Literal["function"]

    def tool(self) -> dict[str, Any]:
        """Convert this tool to the form of a chat request: its fields are inside `function`."""
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedFunction(ToolName):
    """The field `tool_choice`, if it names the tool that the reply must call."""

    type: Literal["function"]


class TextFormat(Fields):
    """The format of a reply: text, any JSON object, or JSON that matches a schema.

    The schema and its name are fields beside `type`; in a chat request, they are inside
    `json_schema`.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class TextOptions(Fields):
    """The field `text` of a request: an object with the format of the reply."""

    format: TextFormat = TextFormat()

    def response_format(self) -> dict[str, Any]:
        """Convert the format of the reply to the field `response_format` of a chat request."""
        given = self.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.format.type} | ({"json_schema": given} if given else {})


def _listed(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _kind(item: Any) -> Any:
    """The type of an item of the field `input`; `message` for an item without a type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


_Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CalledFunction, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


def _messages(items: Iterable[_Item]) -> list[ChatMessage]:
    """Convert the items of the field `input` to messages of a chat request.

    A reply's text and its calls of tools become one message.
    """
    found: list[ChatMessage] = []
    for one in items:
        message = one.message()
        if message.tool_calls and found and found[-1].role == "assistant":
            calls = [*found[-1].tool_calls, *message.tool_calls]
            found[-1] = found[-1].model_copy(update={"tool_calls": calls})
        else:
            found.append(message)
    return found


class ResponsesRequest(Fields):
    """The body of a request to `/v1/responses`."""

    input: Annotated[
        list[_Item],
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
    tools: list[FunctionTool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    sirchat: MemorySettings = MemorySettings()

    def chat(self, before: list[ChatMessage]) -> ChatRequest:
        """Convert this request to a chat request; `before` are the conversation's earlier messages.

        Raises RequestError if a value is not allowed.
        """
        messages = [*before, *_messages(self.input)]
        if self.instructions is not None:
            if messages[0].role == "system":
                raise RequestError(
                    "instructions and a system message can't both be given", param="instructions"
                )
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        fields = {name: getattr(self, name) for name in _SAME}
        named = {} if isinstance(self.tool_choice, str) else {"name": self.tool_choice.name}
        fields |= {
            "messages": messages,
            "tools": [one.tool() for one in self.tools],
            "tool_choice": {"type": "function", "function": named} if named else self.tool_choice,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.response_format(),
        }
        return checked(ChatRequest, fields)


_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "sirchat")


class KeptResponses:
    """Stores the messages of earlier responses, so that later requests can continue them.

    For the id of each response, it has all messages of the chat up to this response, which is the
    last message. If there are more than 1000 responses, or if their texts are too long together,
    the oldest responses are dropped.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[ChatMessage], int]] = OrderedDict()
        self._size = 0

    def add(self, ident: str, before: list[ChatMessage], new: list[ChatMessage]) -> None:
        """Store a response under the id `ident`.

        `before` are the messages before its request; `new` are the messages of its request and
        reply.
        """
        texts = [one.text for one in new]  # texts of earlier messages are shared, not copied
        texts += [call.function.arguments for one in new for call in one.tool_calls]
        size = sum(map(len, texts))
        self._kept[ident] = [*before, *new], size
        self._size += size
        while len(self._kept) > _MOST_KEPT or self._size > _MOST_CHARACTERS:
            self._size -= self._kept.popitem(last=False)[1][1]

    def messages(self, ident: str | None) -> list[ChatMessage]:
        """All messages up to the response with the id `ident`, which is the last one.

        If `ident` is None, returns an empty list. Raises RequestError if no response with this id
        is stored.
        """
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
    """Makes the JSON of one response, in one piece or as events, and stores the response.

    The response is stored, for later requests, only if the request's field `store` is true.
    """

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
            "parallel_tool_calls": asked.parallel_tool_calls,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": asked.model_dump()["tool_choice"],
            "tools": [one.model_dump() for one in asked.tools],
            "truncation": "auto",
            "usage": None,
        }

    async def whole(self, parts: Parts) -> dict[str, Any]:
        """Wait until the reply has ended; returns the JSON object of the whole response."""
        text, said, end = await collected(parts)
        calls = [call for one in said for call in one.calls]
        items = [self._message(_status(end), text)] if text or not calls else []
        return self._done([*items, *map(_call, calls)], end)

    async def events(self, parts: Parts) -> AsyncIterator[str]:
        """Yield the server-sent events of the response, while it is generated."""
        begun, text, items = self._response("in_progress", []), "", list[dict[str, Any]]()
        at: dict[str, Any] = {}  # the place of the text, once there is some
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        try:
            async for part in parts:
                if isinstance(part, ReplyEnd):
                    end = part
                    break
                if part.text and not at:
                    at = self._place(items)
                    for one in self._opened(at, items[-1]):
                        yield one
                if part.text:
                    text += part.text
                    yield self._event(
                        "response.output_text.delta", **at, delta=part.text, logprobs=[]
                    )
                for call in part.calls:
                    items.append(_call(call))
                    for one in self._called(items):
                        yield one
        except RequestError as error:
            told = error.body["error"]
            failed = {"code": told["code"] or "server_error", "message": told["message"]}
            response = self._response("failed", []) | {"error": failed}
            yield self._event("response.failed", response=response)
            return
        if not items:  # the reply is empty
            at = self._place(items)
            for one in self._opened(at, items[-1]):
                yield one
        if at:
            items[at["output_index"]] = item = self._message(_status(end), text)
            for one in self._closed(at, item):
                yield one
        response = self._done(items, end)
        yield self._event(f"response.{response['status']}", response=response)

    def _place(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Append an empty message, for the reply's text, to `items`; returns the place of the text.

        The place is a dictionary of the fields with which events name the message and its part.
        """
        items.append(self._message())
        return {"item_id": self._item, "output_index": len(items) - 1, "content_index": 0}

    def _opened(self, at: dict[str, Any], item: dict[str, Any]) -> Iterator[str]:
        """Yield the events that tell the client, before any text, that the message `item` begins.

        `at` is the place of the text; see `_place`.
        """
        yield self._event("response.output_item.added", output_index=at["output_index"], item=item)
        yield self._event("response.content_part.added", **at, part=_text(""))

    def _closed(self, at: dict[str, Any], item: dict[str, Any]) -> Iterator[str]:
        """Yield the events that tell the client, after all text, that the message `item` ends.

        `at` is the place of the text; see `_place`.
        """
        (part,) = item["content"]
        yield self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _called(self, items: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Yield all events of one tool call, which is the last of the `items`."""
        index, item = len(items) - 1, items[-1]
        at = {"item_id": item["id"], "output_index": index}
        begun, name = item | {"arguments": "", "status": "in_progress"}, "function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"response.{name}.delta", **at, delta=item["arguments"])
        told = {"arguments": item["arguments"], "name": item["name"]}
        yield self._event(f"response.{name}.done", **at, **told)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _done(self, output: list[dict[str, Any]], end: ReplyEnd) -> dict[str, Any]:
        """Make the JSON object of the complete response.

        The response is stored for later requests if the request's field `store` is true.
        """
        if self._asked.store:
            said = TypeAdapter(list[_Item]).validate_python(output)
            self._kept.add(self._id, self._before, _messages([*self._asked.input, *said]))
        status = _status(end)
        more = {
            "usage": _usage(end.usage),
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "sirchat": end.memory,
        }
        return self._response(status, output) | more

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
