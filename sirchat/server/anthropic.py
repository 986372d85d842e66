"""Anthropic's messages API: requests become chat requests; replies are sent whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sirchat.server.fields import (
    MAX_MESSAGES,
    MAX_TOKEN_LIMIT,
    FunctionName,
    Json,
    Options,
    RequestError,
    RequestObject,
    make_request,
)
from sirchat.server.parts import ReplyEnd, ReplyText
from sirchat.server.requests import (
    ChatRequest,
    FlatTool,
    HostedTool,
    ReplyBody,
    chat_tools,
    schema_format,
    shared_fields,
)
from sirchat.server.streaming import ReplySerializer, server_sent_event
from sirchat.text.tool_calls import ToolCall

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_Blocks = Annotated[
    list[dict[str, Any]],
    BeforeValidator(lambda given: [_text(given)] if isinstance(given, str) else given),
]


class AnthropicMessage(RequestObject):
    """One message in the field `messages`; its content is a text, or a list of blocks."""

    role: Literal["system", "user", "assistant"]
    content: _Blocks

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield this message as messages of a chat request; tool results come first."""
        blocks, calls = list[dict[str, Any]](), list[dict[str, Any]]()
        for block in self.content:
            kind = block.get("type")
            if kind == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            elif kind == "tool_result":
                content = block.get("content") or ""
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            elif kind not in ("thinking", "redacted_thinking"):
                blocks.append(block)
        if blocks or calls or not self.content:
            yield {"role": self.role, "content": blocks or "", "tool_calls": calls}


class AnthropicTool(FlatTool):
    """An item of the field `tools`: a function that the client calls."""

    type: Literal["custom"] = "custom"
    parameters: Json = Field(alias="input_schema")


class AnthropicChoice(RequestObject):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(RequestObject):
    """The field `format` of `output_config`, called `output_format` in earlier requests."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class ThinkingOptions(Options):
    """The field `thinking`; a limit on the number of tokens has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputOptions(Options):
    """The field `output_config`: how much the model reasons, and the format of the reply."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def _kind_of_tool(tool: Any) -> str:
    is_hosted = isinstance(tool, dict) and "type" in tool and "input_schema" not in tool
    return "hosted" if is_hosted else "custom"


class MessagesRequest(ReplyBody):
    """The body of a request to `/v1/messages`."""

    model: str
    max_tokens: int = Field(ge=1, le=MAX_TOKEN_LIMIT)
    stop_sequences: list[str] = Field(default=[])
    top_k: int | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _Blocks | None = None
    tools: list[
        Annotated[
            Annotated[AnthropicTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")],
            Discriminator(_kind_of_tool),
        ]
    ] = Field(default=[])
    tool_choice: AnthropicChoice = AnthropicChoice(type="auto")
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions = OutputOptions()
    output_format: OutputFormat | None = None

    def as_chat_request(self) -> ChatRequest:
        """This request in OpenAI's form; raises RequestError if a value is not allowed."""
        messages = list(chain.from_iterable(message.messages() for message in self.messages))
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        choice: Any = self.tool_choice.type.replace("any", "required")
        if choice == "tool":
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        is_single = self.tool_choice.disable_parallel_tool_use
        fields = shared_fields(self) | {
            "stop": self.stop_sequences,
            "messages": messages,
            "tools": chat_tools(self.tools),
            "tool_choice": choice,
            "parallel_tool_calls": None if is_single is None else not is_single,
            "reasoning_effort": self._reasoning_effort,
        }
        if output_format := self.output_config.format or self.output_format:
            fields["response_format"] = schema_format(output_format.schema_)
        return make_request(ChatRequest, fields)

    @property
    def _reasoning_effort(self) -> str | None:
        if self.thinking is None:  # an effort is then one of the answer
            return None
        if self.thinking.type == "disabled":
            return "none"
        effort = (self.output_config.effort or "").replace("max", "xhigh")
        return effort or ("on" if self.thinking.type == "enabled" else None)


class MessageSerializer(ReplySerializer):
    """The JSON of one reply as an Anthropic message, whole or as events."""

    def __init__(self, model: str) -> None:
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
