"""OpenAI's responses API: requests become chat requests; replies are sent whole or as events."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from sirchat.server.fields import (
    MAX_MESSAGES,
    MAX_TOKEN_LIMIT,
    CallId,
    FunctionName,
    Json,
    Name,
    Options,
    RequestError,
    RequestObject,
    join_text_parts,
    make_request,
)
from sirchat.server.parts import ReplyEnd, ReplyText
from sirchat.server.requests import (
    ChatMessage,
    ChatRequest,
    ConversationName,
    Effort,
    FlatTool,
    HostedTool,
    ReplyBody,
    ToolName,
    chat_tools,
    mark_images,
    shared_fields,
)
from sirchat.server.streaming import ReplySerializer, server_sent_event
from sirchat.text.tool_calls import ToolCall

_ID_PREFIXES = {"output_text": "msg_", "reasoning_text": "rs_"}  # of an item's id
# What events with a kind of text have, too.
_EXTRA_FIELDS: dict[str, dict[str, Any]] = {"output_text": {"logprobs": []}, "reasoning_text": {}}
_TEXT_ARGUMENT = "input"  # the argument of a tool that takes a text
# Tools that a request may have, but that can't be had here.
_HOSTED_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp"),
    *("computer_use", "local_shell", "shell", "apply_patch", "tool_search"),
)
_NOT_STORED = "responses are not kept: send their items again, or name the conversation"
# Fields of the request that the response repeats.
_ECHOED_FIELDS = {
    *("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p"),
    *("parallel_tool_calls", "tools"),
}


class FunctionTool(FlatTool):
    type: Literal["function"]


class CustomTool(RequestObject):
    """A tool that takes a text; for the model, it is a function with one argument.

    The model sees the grammar of the text, but it is not enforced.
    """

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Json = Field(default={"type": "text"})

    def functions(self) -> list[dict[str, Any]]:
        descriptions = [self.description or "", str(self.format.get("definition") or "")]
        properties = {_TEXT_ARGUMENT: {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": [_TEXT_ARGUMENT]}
        function = {"description": "\n".join(filter(None, descriptions)), "parameters": schema}
        return [{"name": self.name, **function}]


class Namespace(RequestObject):
    """A named group of functions; functions of two groups may have the same name."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[FunctionTool]

    def functions(self) -> list[dict[str, Any]]:
        functions = chain.from_iterable(tool.functions() for tool in self.tools)
        return [f | {"name": _qualified_name(self.name, f["name"])} for f in functions]


class NamedFunction(ToolName):
    """The field `tool_choice`, if it names the tool that the reply must call."""

    type: Literal["function", "custom"]
    namespace: Name | None = None


class TextFormat(RequestObject):
    """The format of a reply; in a chat request, all but `type` is inside `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class TextOptions(Options):
    """The field `text` of a request, which has the format of the reply."""

    format: TextFormat = TextFormat()

    def response_format(self) -> dict[str, Any]:
        """The format as the field `response_format` of a chat request."""
        schema = self.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.format.type} | ({"json_schema": schema} if schema else {})


class ReasoningOptions(Options):
    """The field `reasoning` of a request."""

    effort: Effort | None = None


class InputMessage(RequestObject):
    """A message in the field `input` of a request."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(join_text_parts)]

    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content}


class CalledFunction(RequestObject):
    """A tool call in the field `input` of a request."""

    type: Literal["function_call"]
    call_id: CallId
    namespace: Name | None = None
    name: FunctionName
    arguments: str

    @field_validator("name", mode="before")
    @classmethod
    def _in_its_namespace(cls, name: Any, info: ValidationInfo) -> Any:
        return _qualified_name(info.data.get("namespace"), name) if isinstance(name, str) else name

    def message(self) -> dict[str, Any]:
        call = ToolCall(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "tool_calls": [call.message()]}


class CalledCustom(RequestObject):
    """A call of a `CustomTool`, in the field `input` of a request."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: FunctionName
    input: str

    def message(self) -> dict[str, Any]:
        arguments = json.dumps({_TEXT_ARGUMENT: self.input}, ensure_ascii=False)
        call = ToolCall(self.call_id, self.name, arguments)
        return {"role": "assistant", "tool_calls": [call.message()]}


class CallOutput(RequestObject):
    """The result of one tool call, in the field `input` of a request."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Annotated[str, BeforeValidator(join_text_parts), BeforeValidator(mark_images)]

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


_ITEMS: dict[str, Any] = {"function_call": CalledFunction, "custom_tool_call": CalledCustom}


def _as_messages(items: Any) -> Any:
    """The field `input` as messages, without ignored items: reasoning and hosted calls."""
    if not isinstance(items, list):
        return [{"role": "user", "content": items}] if isinstance(items, str) else items
    ignored_types = ["reasoning", *(f"{kind}_call" for kind in _HOSTED_TOOLS)]
    messages = list[Any]()
    for number, item in enumerate(items):
        kind = str(item.get("type")) if isinstance(item, dict) else ""
        is_only_id = kind == "None" and "id" in item and "role" not in item
        if kind == "item_reference" or is_only_id:
            raise RequestError(_NOT_STORED, param="input")
        if kind not in ignored_types and len(messages) <= MAX_MESSAGES:  # one more is refused
            item_class = CallOutput if kind.endswith("_output") else _ITEMS.get(kind, InputMessage)
            messages.append(make_request(item_class, item, "input", number).message())
    return messages


def _kind_of_tool(tool: Any) -> str:
    # A tool is an object when the response repeats it.
    kind = str(tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", ""))
    is_hosted = any(kind == each or kind.startswith(f"{each}_preview") for each in _HOSTED_TOOLS)
    return "hosted" if is_hosted else kind


def _qualified_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


class ResponsesRequest(ReplyBody):
    """The body of a request to `/v1/responses`."""

    input: Annotated[
        list[ChatMessage],
        BeforeValidator(_as_messages),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKEN_LIMIT)
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[Namespace, Tag("namespace")]
            | Annotated[HostedTool, Tag("hosted")],
            Discriminator(_kind_of_tool),
        ]
    ] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    conversation: Annotated[
        ConversationName | None,
        BeforeValidator(lambda given: given.get("id") if isinstance(given, dict) else given),
    ] = None

    def check(self) -> None:
        """Raise RequestError if the request continues a response."""
        if self.previous_response_id is not None:
            raise RequestError(_NOT_STORED, param="previous_response_id")

    def as_chat_request(self) -> ChatRequest:
        """This request in the form of chat completions; raises RequestError if impossible."""
        messages = [*self.input]
        if self.instructions is not None:
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        choice: Any = self.tool_choice
        if not isinstance(choice, str):
            name = _qualified_name(choice.namespace, choice.name)
            choice = {"type": "function", "function": {"name": name}}
        fields = shared_fields(self) | {
            "messages": messages,
            "tools": chat_tools(self.tools),
            "tool_choice": choice,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.response_format(),
            "reasoning_effort": self.reasoning.effort,
        }
        if self.conversation is not None:
            fields["sirchat"] = self.sirchat.model_copy(update={"conversation": self.conversation})
        return make_request(ChatRequest, fields)


class ResponsesSerializer(ReplySerializer):
    """The JSON of one response, whole or as events."""

    def __init__(self, request: ResponsesRequest, model: str) -> None:
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, tuple[dict[str, Any], str]] = {}  # unfinished texts, by their kind
        self._response = dict[str, Any]()  # when it has ended
        self._number, self._is_unstreamed = 0, False  # of the next event; whether there are none
        self._custom_tools = {tool.name for tool in request.tools if isinstance(tool, CustomTool)}
        self._namespaced = {  # how clients name the functions of namespaces
            _qualified_name(space.name, tool.name): {"name": tool.name, "namespace": space.name}
            for space in request.tools
            if isinstance(space, Namespace)
            for tool in space.tools
        }
        self._common = {
            **request.model_dump(include=_ECHOED_FIELDS),
            **request.model_dump(include={"tool_choice"}, exclude_none=True),
            "id": f"resp_{secrets.token_hex(24)}",
            "store": False,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "conversation": request.conversation and {"id": request.conversation},
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "truncation": "auto",
            "usage": None,
        }

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        self._is_unstreamed = True
        deque(self.part_events(reply), maxlen=0)
        self.last_events(end)
        return self._response

    def first_events(self) -> Iterable[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response_with("in_progress"))

    def part_events(self, part: ReplyText) -> Iterable[str]:
        if part.thinking:
            yield from self._add_text("reasoning_text", part.thinking)
        if part.text or part.calls:
            yield from self._end_text("reasoning_text", "completed")
        if part.text:
            yield from self._add_text("output_text", part.text)
        for call in part.calls:
            yield from self._add_call(call)

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        status, incomplete, events = "completed", None, list[str]()
        if end.finish == "length":
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        if not self._items:  # the reply is empty
            events += self._add_text("output_text", "")
        for kind in tuple(self._open):
            events += self._end_text(kind, status)
        fields = {"usage": _usage(end.usage), "incomplete_details": incomplete}
        self._response = self._response_with(status, **fields, sirchat=end.memory)
        return [*events, self._event(f"response.{status}", response=self._response)]

    def error_events(self, error: RequestError) -> Iterable[str]:
        problem = {"code": error.body["error"]["code"] or "server_error", "message": str(error)}
        self._items = []
        yield self._event("response.failed", response=self._response_with("failed", error=problem))

    def _add_text(self, kind: str, text: str) -> Iterator[str]:
        """Add text to the output item of the reasoning or the answer; begins it if necessary."""
        if kind not in self._open:
            index, ident = len(self._items), f"{_ID_PREFIXES[kind]}{secrets.token_hex(24)}"
            place = {"item_id": ident, "output_index": index, "content_index": 0}
            self._open[kind] = place, ""
            self._items.append(item := _output_item(kind, ident, "in_progress", []))
            yield self._event("response.output_item.added", output_index=index, item=item)
            yield self._event("response.content_part.added", **place, part=_text_part(kind, ""))
        place, before = self._open[kind]
        self._open[kind] = place, before + text
        if text:
            yield self._event(f"response.{kind}.delta", **place, delta=text, **_EXTRA_FIELDS[kind])

    def _end_text(self, kind: str, status: str) -> Iterator[str]:
        if kind in self._open:
            place, text = self._open.pop(kind)
            index, part = place["output_index"], _text_part(kind, text)
            self._items[index] = item = _output_item(kind, place["item_id"], status, [part])
            yield self._event(f"response.{kind}.done", **place, text=text, **_EXTRA_FIELDS[kind])
            yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _add_call(self, call: ToolCall) -> Iterator[str]:
        names = self._namespaced.get(call.name, {"name": call.name})
        kind, field, text, prefix = "function_call", "arguments", call.arguments, "fc"
        name_field = {"name": names["name"]}
        if call.name in self._custom_tools:
            text, name_field = str(json.loads(call.arguments).get(_TEXT_ARGUMENT, "")), {}
            kind, field, prefix = "custom_tool_call", "input", "ctc"
        ident, index = f"{prefix}_{secrets.token_hex(24)}", len(self._items)
        item = {"id": ident, "type": kind, "status": "completed", "call_id": call.id, **names}
        empty_item, item = item | {"status": "in_progress", field: ""}, item | {field: text}
        place = {"item_id": ident, "output_index": index}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=index, item=empty_item)
        yield self._event(f"response.{kind}_{field}.delta", **place, delta=text)
        yield self._event(f"response.{kind}_{field}.done", **place, **{field: text}, **name_field)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _response_with(self, status: str, **fields: Any) -> dict[str, Any]:
        return {**self._common, "status": status, "output": [*self._items], **fields}

    def _event(self, kind: str, **fields: Any) -> str:
        if self._is_unstreamed:  # nobody gets it
            return ""
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return server_sent_event(numbered, kind)


def _output_item(kind: str, ident: str, status: str, content: list[Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": "message", "role": "assistant"}
    if kind == "reasoning_text":
        fields = {"type": "reasoning", "summary": []}
    return {"id": ident, **fields, "status": status, "content": content}


def _text_part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more, **_EXTRA_FIELDS[kind]}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
