"""Anthropic's messages API: requests become chat requests; replies are sent whole or as events."""

from __future__ import annotations

import json
import secrets
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

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

NAMES = {  # what fields of a chat request are called here
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}


def chat_fields(body: Fields) -> Fields:
    """A request to `/v1/messages` in the form of chat completions; RequestError if impossible."""
    fields = dict(body)
    messages = list[Any]()
    if system := fields.pop("system", None):
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(take_objects(fields, "messages")):
        each = _chat_messages(message, f"messages.{number}.content")
        messages += (make_request(ChatMessage, one, "messages", number) for one in each)
    tools = list[Fields]()
    for tool in take_objects(fields, "tools"):
        if "type" in tool and "input_schema" not in tool:  # one that only Anthropic runs
            fields[f"tools.{tool['type']}"] = True
        else:
            tools.append(function_tool(tool, "input_schema"))
    choice = checked(fields.pop("tool_choice", None), {"type": "auto"}, "tool_choice")
    kind = choice.get("type")
    is_single = choice.get("disable_parallel_tool_use")
    thinking = take_options(fields, "thinking", ("type",)).get("type")
    output = take_options(fields, "output_config", ("effort", "format"))
    effort = "xhigh" if output.get("effort") == "max" else output.get("effort")
    fields |= {
        "messages": messages,
        "stop": fields.pop("stop_sequences", None),
        "tools": tools,
        "tool_choice": tool_named(choice.get("name")) if kind == "tool" else kind,
        "parallel_tool_calls": None if is_single is None else not is_single,
    }
    if kind == "any":
        fields["tool_choice"] = "required"
    if thinking is not None:  # else an effort is one of the answer
        fields["reasoning_effort"] = effort or ("on" if thinking == "enabled" else None)
    if thinking == "disabled":
        fields["reasoning_effort"] = "none"
    older_format = fields.pop("output_format", None)
    if given := checked(output.get("format") or older_format, Fields(), "output_config.format"):
        schema = {"name": "format", "schema": given.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _chat_messages(message: Fields, place: str) -> Iterator[Fields]:
    """Yield a message as messages of a chat request; tool results come first."""
    content = message.get("content")
    blocks = [_text(content)] if isinstance(content, str) else checked(content, list[Any](), place)
    shown, calls = list[Fields](), list[Fields]()
    for number, each in enumerate(blocks):
        block = checked(each, Fields(), f"{place}.{number}")
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            result = block.get("content") or ""
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind not in ("thinking", "redacted_thinking"):
            shown.append(block)
    if shown or calls or not blocks:
        yield {"role": message.get("role"), "content": shown or "", "tool_calls": calls}


class MessageSerializer(ReplySerializer):
    """The JSON of one reply as an Anthropic message, whole or as events."""

    def __init__(self, request: Fields, model: str) -> None:
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._index, self._open = -1, ""  # of the last block, and its kind if that has not ended

    def response_body(self, reply: ReplyText, end: ReplyEnd) -> dict[str, Any]:
        content = [_thinking(reply.thinking)] if reply.thinking else []
        content += [_text(reply.text)] if reply.text or not reply.calls else []
        content += [_call(call) | {"input": json.loads(call.arguments)} for call in reply.calls]
        return {**self._message, "content": content, **_stop_fields(end), "sirchat": end.memory}

    def first_events(self) -> Iterable[str]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return (_event("message_start", message={**self._message, **empty, "usage": _usage({})}),)

    def last_events(self, end: ReplyEnd) -> Iterable[str]:
        yield from self._end_block()
        stop_fields = _stop_fields(end)
        usage = stop_fields.pop("usage")
        yield _event("message_delta", delta=stop_fields, usage=usage, sirchat=end.memory)
        yield _event("message_stop")

    def error_events(self, error: RequestError) -> Iterable[str]:
        return (server_sent_event(error.body_for("/messages"), "error"),)

    def part_events(self, part: ReplyText) -> Iterable[str]:
        for kind, text in (("thinking", part.thinking), ("text", part.text)):
            if text:
                empty = _thinking("") if kind == "thinking" else _text("")
                yield from self._begin_block(kind, empty)
                yield self._delta(type=f"{kind}_delta", **{kind: text})
        for call in part.calls:
            yield from self._begin_block("", _call(call))
            yield self._delta(type="input_json_delta", partial_json=call.arguments)
            yield _event("content_block_stop", index=self._index)

    def _begin_block(self, kind: str, block: dict[str, Any]) -> Iterator[str]:
        if not kind or kind != self._open:
            yield from self._end_block()
            self._index, self._open = self._index + 1, kind
            yield _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> Iterator[str]:
        if self._open == "thinking":
            yield self._delta(type="signature_delta", signature=_thinking("")["signature"])
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, **delta: str) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)


def _stop_fields(end: ReplyEnd) -> dict[str, Any]:
    reason = "stop_sequence" if end.stopped_by else _STOP_REASONS.get(end.finish, "end_turn")
    fields = {"stop_reason": reason, "stop_sequence": end.stopped_by or None}
    return fields | {"usage": _usage(end.usage)}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "sirchat"}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _event(kind: str, **fields: Any) -> str:
    return server_sent_event({"type": kind, **fields}, kind)
