"""OpenAI's responses API: requests become chat requests; replies are sent whole or as events."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from sirchat.server.fields import (
    Fields,
    RequestError,
    checked,
    make_request,
    take_objects,
    take_options,
)
from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.requests import ChatMessage, function_tool, tool_named
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
_IGNORED_ITEMS = ("reasoning", *(f"{kind}_call" for kind in _HOSTED_TOOLS))
_NOT_STORED = "responses are not kept: send their items again, or name the conversation"
# Fields of the request that the response repeats, and their defaults.
_ECHOED_FIELDS: Fields = {
    **dict.fromkeys(("instructions", "previous_response_id", "max_output_tokens")),
    **dict.fromkeys(("temperature", "top_p")),
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
}

NAMES = {  # what fields of a chat request are called here
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def chat_fields(body: Fields) -> Fields:
    """A request to `/v1/responses` in the form of chat completions; RequestError if impossible."""
    fields = dict(body)
    if fields.pop("previous_response_id", None) is not None:
        raise RequestError(_NOT_STORED, param="previous_response_id")
    messages = list[Any]()
    if (instructions := fields.pop("instructions", None)) is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(fields.get("input"), str):
        messages.append({"role": "user", "content": fields.pop("input")})
    for number, item in enumerate(take_objects(fields, "input")):
        each = _chat_messages(item, f"input.{number}")
        messages += (make_request(ChatMessage, message, "input", number) for message in each)
    tools = list[Fields]()
    for number, tool in enumerate(take_objects(fields, "tools")):
        kind = str(tool.get("type"))
        if any(kind == each or kind.startswith(f"{each}_preview") for each in _HOSTED_TOOLS):
            fields[f"tools.{kind}"] = True
        else:
            tools += _functions(tool, f"tools.{number}")
    choice = fields.pop("tool_choice", None)
    if isinstance(choice, dict):
        choice = tool_named(_qualified_name(choice.get("namespace"), choice.get("name")))
    text_format = take_options(fields, "text", ("format",)).get("format")
    fields |= {
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "max_completion_tokens": fields.pop("max_output_tokens", None),
        "reasoning_effort": take_options(fields, "reasoning", ("effort",)).get("effort"),
    }
    if schema := dict(checked(text_format, Fields(), "text.format")):
        response_format = {"type": schema.pop("type", None)}
        fields["response_format"] = response_format | ({"json_schema": schema} if schema else {})
    conversation = fields.pop("conversation", None)
    if conversation is not None:
        name = conversation.get("id") if isinstance(conversation, dict) else conversation
        given = checked(fields.get("sirchat"), Fields(), "sirchat")
        fields["sirchat"] = {**given, "conversation": name}
    return fields


def _chat_messages(item: Fields, place: str) -> Iterator[Fields]:
    """Yield an item of the input as a message of a chat request; hosted calls are left out."""
    kind, call_id = item.get("type") or "message", item.get("call_id")
    if kind == "item_reference" or ("id" in item and "type" not in item and "role" not in item):
        raise RequestError(_NOT_STORED, param="input")
    if kind == "message":
        yield {"role": item.get("role"), "content": item.get("content")}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        yield {"role": "tool", "tool_call_id": call_id, "content": item.get("output")}
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = {_TEXT_ARGUMENT: item.get("input")}
        name = _qualified_name(item.get("namespace"), item.get("name"))
        function = {"name": name, "arguments": arguments}
        yield {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]}
    elif kind not in _IGNORED_ITEMS:
        raise RequestError(f"{place}: items of this type are not read", param=f"{place}.type")


def _functions(tool: Fields, place: str) -> Iterator[Fields]:
    """Yield the functions of a tool, in the form of a chat request; a tool of a text is one, too.

    Functions of two groups (`namespace`) may have the same name.
    """
    kind, name = tool.get("type"), tool.get("name")
    if kind == "namespace":
        for each in take_objects(tool, "tools"):
            yield function_tool({**each, "name": _qualified_name(name, each.get("name"))})
    elif kind == "custom":  # the model sees the grammar of the text, but it is not enforced
        grammar = checked(tool.get("format"), Fields(), f"{place}.format").get("definition")
        texts = [checked(tool.get("description"), "", f"{place}.description"), str(grammar or "")]
        properties = {_TEXT_ARGUMENT: {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": [_TEXT_ARGUMENT]}
        description = "\n".join(filter(None, texts))
        yield function_tool({"name": name, "description": description, "parameters": schema})
    elif kind == "function":
        yield function_tool(tool)
    else:
        raise RequestError(f"{place}: tools of this type can't be had", param=f"{place}.type")


def _qualified_name(namespace: Any, name: Any) -> Any:
    return f"{namespace}.{name}" if namespace and isinstance(name, str) else name


class ResponsesSerializer(ReplySerializer):
    """The JSON of one response, whole or as events."""

    def __init__(self, request: Fields, model: str) -> None:
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, tuple[dict[str, Any], str]] = {}  # unfinished texts, by their kind
        self._response = dict[str, Any]()  # when it has ended
        self._number, self._is_unstreamed = 0, False  # of the next event; whether there are none
        tools = request.get("tools") or []
        self._custom_tools = {tool["name"] for tool in tools if tool["type"] == "custom"}
        self._namespaced = {  # how clients name the functions of namespaces
            _qualified_name(space.get("name"), tool["name"]): {
                "name": tool["name"],
                "namespace": space.get("name"),
            }
            for space in tools
            if space["type"] == "namespace"
            for tool in space.get("tools") or ()
        }
        conversation = request.get("conversation")
        is_name = isinstance(conversation, str)
        self._common = {
            **_ECHOED_FIELDS,
            **{name: request[name] for name in _ECHOED_FIELDS if request.get(name) is not None},
            "id": f"resp_{secrets.token_hex(24)}",
            "store": False,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "conversation": {"id": conversation} if is_name else conversation,
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
