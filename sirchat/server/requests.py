"""The fields of requests for a reply, in OpenAI's form; refuses what the server can't do."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sirchat.config.profile import MIN_TEMPERATURE
from sirchat.errors import format_value
from sirchat.server.fields import (
    EMPTY_VALUES,
    MAX_MESSAGES,
    MAX_TOKEN_LIMIT,
    CallId,
    Fields,
    FunctionName,
    Name,
    RequestError,
    RequestObject,
    join_text_parts,
)
from sirchat.text.tool_calls import CallParser, ToolCall, calls_key

MAX_NAME_CHARS = 256  # of a conversation

_MAX_STOP_STRINGS = 64
_MAX_TOOLS = 128
_MAX_NOTE_CHARS = 300

_SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
# The setting `reasoning` that an effort stands for, if it has another name.
_REASONING_OF_EFFORT = {"none": "off", "minimal": "low", "xhigh": "high"}
# Between which values a setting is had: others, from 0 on, are changed to the nearest.
_SETTING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    "top_p": (1e-6, 1),
    "min_p": (0, 0.99),
    "repetition_penalty": (0.1, 10),
}
_NO_RESULT = "no result"
_IMAGE_MARK = {"type": "text", "text": "[an image, which can't be seen]"}


def _as_json_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


class FunctionCall(RequestObject):
    """The field `function` of a tool call; `arguments` is JSON text."""

    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_as_json_text)]


class ToolCallFields(RequestObject):
    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionFields(RequestObject):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: Fields = Field(default={"type": "object", "properties": {}})
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_object_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise PydanticCustomError("object", "a tool's arguments are an object")
        return schema | {"type": "object"}


class Tool(RequestObject):
    """An item of the field `tools`."""

    type: Literal["function"]
    function: FunctionFields


def clamped_setting(name: str, value: Any) -> Any:
    """The value that a setting has for a reply, if a request gives it `value`."""
    if name not in _SETTING_RANGES:
        return value
    low, high = _SETTING_RANGES[name]
    if name == "temperature" and 0 < value < MIN_TEMPERATURE:
        return MIN_TEMPERATURE if value > MIN_TEMPERATURE / 2 else 0
    return value if value < 0 else min(max(value, low), high)


class ToolName(RequestObject):
    """An object whose only field is the name of a tool."""

    name: FunctionName


class NamedTool(RequestObject):
    """The field `tool_choice`, if it names the tool that the reply must call."""

    type: Literal["function"]
    function: ToolName


class ChatMessage(RequestObject):
    """One message in the field `messages` of a chat request."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str | None, BeforeValidator(join_text_parts)] = None
    tool_calls: list[ToolCallFields] = Field(default=[])
    tool_call_id: CallId | None = None
    name: Name | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _mark_images(cls, content: Any, info: ValidationInfo) -> Any:
        if info.data.get("role") != "tool" or not isinstance(content, list):
            return content
        kinds = [part.get("type", "") if isinstance(part, dict) else "" for part in content]
        pairs = zip(content, kinds, strict=True)
        return [_IMAGE_MARK if "image" in str(kind) else part for part, kind in pairs]

    @property
    def text(self) -> str:
        """The message's text; "" if it has only tool calls."""
        return self.content or ""

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        is_tool, calls = self.role == "tool", bool(self.tool_calls)
        if calls and self.role != "assistant":
            raise PydanticCustomError("calls", "only the assistant calls tools")
        if self.content is None and self.role in ("system", "user"):
            raise PydanticCustomError("missing", "content is missing")
        if is_tool != (self.tool_call_id is not None):
            raise PydanticCustomError(
                "tool", "messages of role tool, and no others, have tool_call_id"
            )
        return self


class JsonSchema(RequestObject):
    """The field `json_schema` of a reply's format; the model does not see its name."""

    name: Name
    schema_: Fields = Field(default={"type": "object"}, alias="schema")


class ResponseFormat(RequestObject):
    """The field `response_format`: the reply is text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: Fields | None = Field(default=None, alias="schema")  # of a JSON object

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "schema", "give json_schema with type json_schema, and only then"
            )
        return self

    @property
    def reply_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the reply must match; None if the reply is text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return (self.schema_ or {"type": "object"}) if self.type == "json_object" else None


class StreamOptions(RequestObject):
    """The field `stream_options`: whether a streamed response ends with token counts."""

    include_usage: bool = False


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "on"]


class TemplateOptions(RequestObject):
    """The field `chat_template_kwargs`, with the usual name of the switch of reasoning."""

    model_config = ConfigDict(extra="allow")
    enable_thinking: bool | None = None


ConversationName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class ConversationFields(RequestObject):
    """The field `sirchat`: the name by which the client continues a conversation."""

    model_config = ConfigDict(extra="forbid")
    conversation: ConversationName | None = None


class ChatRequest(RequestObject):
    """A request for a reply in a chat, with the fields of OpenAI's chat completions.

    Requests of other APIs are translated to this form. `ChatServer` checks sampling settings.
    """

    model_config = ConfigDict(extra="allow")  # which a note names
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # as llama.cpp calls it
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(
            lambda stop: [s for s in stop if s != ""] if isinstance(stop, list) else [stop]
        ),
        Field(max_length=_MAX_STOP_STRINGS),
    ] = Field(default=[])
    stream: bool = False
    sirchat: ConversationFields = ConversationFields()
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKEN_LIMIT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKEN_LIMIT)
    stream_options: StreamOptions = StreamOptions()
    tools: list[Tool] = Field(default=[], max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    def settings(self) -> dict[str, Any]:
        """The settings that the request changes for this reply alone, by name."""
        settings = {name: getattr(self, name) for name in _SAMPLING_SETTINGS}
        settings["max_new_tokens"] = self.max_completion_tokens or self.max_tokens
        if self.repeat_penalty is not None:
            settings["repetition_penalty"] = self.repeat_penalty
        if self.seed is not None:
            settings["seed"] = self.seed % 2**63
        is_thinking = self.chat_template_kwargs.enable_thinking
        effort = self.reasoning_effort or {None: None, True: "on", False: "none"}[is_thinking]
        settings["reasoning"] = _REASONING_OF_EFFORT.get(effort or "", effort)
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def required_tools(self) -> list[FunctionFields]:
        """The tools of which the reply must call one, if `tool_choice` requires a call."""
        if self.tool_choice in ("none", "auto"):
            return []
        name = None if isinstance(self.tool_choice, str) else self.tool_choice.function.name
        return [tool.function for tool in self.tools if name in (None, tool.function.name)]

    def call_parser(self) -> CallParser | None:
        """A parser for calls in the reply; None if the reply must not call tools."""
        if not self.tools or self.tool_choice == "none":
            return None
        ids = [call.id for turn in self._turns for call in turn.calls]
        numbers = [int(call_id[4:]) for call_id in ids if re.fullmatch(r"call[0-9]{5}", call_id)]
        names = {tool.function.name: tool.function.parameters for tool in self.tools}
        single_call = not self.parallel_tool_calls
        return CallParser(names, max(numbers, default=-1) + 1, single_call=single_call)

    @property
    def system(self) -> str | None:
        """The text of the system messages with which the chat begins."""
        messages = self.messages[: self._prompt_length]
        return "\n\n".join(message.text for message in messages) if messages else None

    @property
    def turns(self) -> list[tuple[str, str]]:
        return [turn.role_and_text() for turn in self._turns]

    @cached_property
    def _turns(self) -> list[_Turn]:
        return _merged_turns(self.messages[self._prompt_length :])

    @property
    def _prompt_length(self) -> int:
        roles = (number for number, m in enumerate(self.messages) if m.role != "system")
        return next(roles, len(self.messages))

    def ignored_fields_notes(self) -> list[str]:
        """A note for the client about fields without effect, if there are any."""
        given = [*(self.model_extra or {}).items()]
        options = self.chat_template_kwargs.model_extra or {}
        given += [(f"chat_template_kwargs.{name}", value) for name, value in options.items()]
        names = [json.dumps(name) for name, value in given if value not in (*EMPTY_VALUES, 0)]
        return [f"without effect: {', '.join(names)}"[:_MAX_NOTE_CHARS]] if names else []

    def check(self) -> None:
        """Raise RequestError if fields contradict each other."""
        if self.tool_choice not in ("none", "auto") and not self.required_tools:
            raise RequestError("tool_choice names no tool of the request", param="tool_choice")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens"
            )


_Result = tuple[str, str, str]  # of a call: its id, the tool's name, the text


@dataclass
class _Turn:
    """One turn of a chat, as every chat template has it."""

    role: str
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.text = "\n\n".join(filter(None, [self.text, text]))

    def role_and_text(self) -> tuple[str, str]:
        """Role and text; the roles `calls` (a reply with calls) and `tool` have JSON."""
        if self.role == "tool":
            return "tool", json.dumps(self.results, ensure_ascii=False)
        return ("calls", calls_key(self.text, self.calls)) if self.calls else (self.role, self.text)


def _merged_turns(messages: Sequence[ChatMessage]) -> list[_Turn]:
    """The messages after the system prompt as turns: of the user, replies, results of calls.

    A later system message is a part of the next user turn; replies in a row are one. The first turn
    is the user's, and the last one is no reply: a missing user turn is empty.
    """
    turns = list[_Turn]()
    open_calls = dict[str, str]()  # the tools that a reply has called, by the id of the call
    speakers = {message.name for message in messages if message.role == "assistant"}
    role_before = ""
    for number, message in enumerate(messages or [ChatMessage(role="user", content="")]):
        role, text = message.role, message.text
        if message.name and (role != "assistant" or len(speakers) > 1):
            text = f"{message.name}: {text}"
        if role == "assistant":
            if not turns:
                turns.append(_Turn("user"))
            if turns[-1].role != "assistant":
                turns.append(_Turn("assistant"))
            turns[-1].add(text)
            called = [(call.id, call.function) for call in message.tool_calls]
            turns[-1].calls += [ToolCall(id, of.name, of.arguments) for id, of in called]
            open_calls |= {id: of.name for id, of in called}
        elif role == "tool" and any(turn.role != "user" for turn in turns):
            if (call_id := message.tool_call_id or "") not in open_calls:
                results = sum(earlier.role == "tool" for earlier in messages[: number + 1])
                problem = f"tool result {results} answers the call {format_value(call_id)}, but "
                problem += "the reply before has no such call, or it is answered already"
                raise RequestError(problem, param="messages")
            name = open_calls.pop(call_id)
            _add_results(turns, [(call_id, message.name or name, message.text)])
        else:  # a tool's result, too, whose call is in a part that was cut off
            _answer_calls(turns, open_calls)
            if role_before != "system":
                turns.append(_Turn("user"))
            turns[-1].add(text)
        role_before = role
    _answer_calls(turns, open_calls)
    if turns[-1].role == "assistant":
        turns[-1:] = [turns[-1], _Turn("user")] if turns[-1].text.strip() else []
    return turns


def _add_results(turns: list[_Turn], results: Sequence[_Result]) -> None:
    if turns[-1].role != "tool":
        turns.append(_Turn("tool"))
    turns[-1].results += results


def _answer_calls(turns: list[_Turn], open_calls: dict[str, str]) -> None:
    """Add results that say nothing, for all calls without a result."""
    if open_calls:
        _add_results(turns, [(id, name, _NO_RESULT) for id, name in sorted(open_calls.items())])
    open_calls.clear()


def function_tool(tool: Fields, parameters: str = "parameters") -> Fields:
    """A tool of a chat request, of a function whose fields have no object of their own."""
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": {**function, "parameters": tool.get(parameters)}}


def tool_named(name: Any) -> Fields:
    """The field `tool_choice` of a chat request that names a tool."""
    return {"type": "function", "function": {"name": name}}
