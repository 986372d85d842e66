"""The fields of requests for a reply, in OpenAI's shape; what the server can't obey is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sirchat.errors import format_value
from sirchat.memory.policies import is_path

MOST_BYTES = 16 * 2**20  # of a request's body
MOST_MESSAGES = 10_000
MANY = 10**9  # the highest limit of tokens, such as `max_tokens`, that a request may give

_MOST_STOPS = 4
_MOST_TOOLS = 128
_DEEPEST = 64  # levels of nested lists and objects

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "keep_alive")
_LISTS = {"messages", "input"}
# Values that change nothing, of fields that some requests do not support; others are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "store": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "background": (False,),
    "think": (False,),
    "parallel_tool_calls": (True,),
    "truncation": ("auto",),
    "echo": (False,),
    "tool_choice": ("none", "auto"),
    "service_tier": ("auto", "default"),
}


class RequestError(Exception):
    """A request can't be answered; `body` is the JSON of the response, as OpenAI writes errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers or {}


def refuse_deep_nesting(value: Any) -> Any:
    """Return the JSON value unchanged; PydanticCustomError if it is nested too deeply."""
    level = [value]
    for _ in range(_DEEPEST):
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [
            each for item in nested for each in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise PydanticCustomError("deep", "lists and objects are nested too deeply")


def join_text_parts(
    content: Any, kinds: Sequence[str] = ("text",), extra: Sequence[str] = ()
) -> Any:
    """Join a list of text parts, of one of these `kinds`, to one text; return all else unchanged.

    Further fields of parts with names in `extra` are ignored. PydanticCustomError for other parts.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in kinds
        if not is_text or set(part) - {*extra} != {"type", "text"} or type(part["text"]) is not str:
            raise PydanticCustomError("content", "only text is read: no images, audio or files")
    return "\n".join(part["text"] for part in content)


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:|/-]{1,256}$")]
Json = Annotated[dict[str, Any], BeforeValidator(refuse_deep_nesting)]


class Fields(BaseModel):
    """Base class of requests and their parts; it refuses fields that a subclass does not define."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise RequestError if the values of some fields contradict each other."""


class FunctionCall(Fields):
    """The field `function` of a tool call; `arguments` is JSON text."""

    name: Name
    arguments: str
    parsed_arguments: Any = None  # OpenAI's client adds it to calls that it sends back


class CallFields(Fields):
    """A tool call in a message of the assistant."""

    index: int | None = None  # the calls of a streamed reply have it
    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionFields(Fields):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: Json = {"type": "object", "properties": {}}
    strict: bool | None = None


class Tool(Fields):
    """An item of the field `tools`."""

    type: Literal["function"]
    function: FunctionFields


class ToolName(Fields):
    """An object whose only field is the name of a tool."""

    name: Name


class NamedTool(Fields):
    """The field `tool_choice`, if it names the tool that the reply must call."""

    type: Literal["function"]
    function: ToolName


class ChatMessage(Fields):
    """One message in the field `messages` of a chat request."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str | None, BeforeValidator(join_text_parts)] = None
    tool_calls: list[CallFields] = Field(default=[])
    tool_call_id: CallId | None = None
    name: Name | None = None
    parsed: Any = None  # OpenAI's client adds it to replies that it sends back
    reasoning_content: Any = None  # of earlier replies, which the conversation has

    @property
    def text(self) -> str:
        """The message's text; "" if it has only calls of tools."""
        return self.content or ""

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        is_tool, calls = self.role == "tool", bool(self.tool_calls)
        if calls and self.role != "assistant":
            raise PydanticCustomError("calls", "only the assistant calls tools")
        if self.content is None and not calls:
            raise PydanticCustomError("missing", "content is missing")
        if is_tool != (self.tool_call_id is not None) or (self.name is not None and not is_tool):
            raise PydanticCustomError(
                "tool", "messages of role tool, and no others, have tool_call_id, and may have name"
            )
        return self


class JsonSchema(Fields):
    """The field `json_schema` of a reply's format; the model does not see its name."""

    name: Name
    description: str | None = None
    strict: bool | None = None
    schema_: Json = Field(default={"type": "object"}, alias="schema")


class ResponseFormat(Fields):
    """The field `response_format`: the reply is text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _with_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "schema", "give json_schema with type json_schema, and only then"
            )
        return self

    @property
    def schema_of_reply(self) -> dict[str, Any] | None:
        """The JSON schema that the reply must match; None if the reply is text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class StreamOptions(Fields):
    """The field `stream_options`: whether a streamed response ends with the token counts."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class MemorySettings(Fields):
    """The field `sirchat`: settings of the conversation's memory, for this reply.

    None stands for the value that was set for the conversation before, or else the server's.
    """

    policy: str | None = None
    budget: int | None = None
    decay: float | str | None = None
    recall: str | None = None

    @field_validator("policy")
    @classmethod
    def _without_code(cls, name: str | None) -> str | None:
        if name is not None and is_path(name):  # the server would run code that a client chose
            raise PydanticCustomError("policy", "a request can't name a policy of your own")
        return name

    def given(self) -> dict[str, Any]:
        """The settings that the request has, by name."""
        return self.model_dump(exclude_none=True)


class OwnSession(Fields):
    """The field `sirchat_ask`, by which `sirchat ask` gets the reply that it would generate itself.

    The reply comes from a session of its own, under these `settings` and sirchat's defaults, not
    the server's; nothing of it is kept. `holds_all` raises the budget to hold all of the message.
    """

    settings: dict[str, Any]
    holds_all: bool = False


class ReplyRequest(Fields):
    """The fields that chat and text requests have; `ChatServer` checks sampling settings."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MANY)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
        Field(max_length=_MOST_STOPS),
    ] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    sirchat: MemorySettings = MemorySettings()

    def settings(self) -> dict[str, Any]:
        """The settings that the request changes for this reply alone, by name."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        given["max_new_tokens"] = self.max_tokens
        return {name: value for name, value in given.items() if value is not None}


class TextRequest(ReplyRequest):
    """The body of a request to `/v1/completions`: the model continues the text `prompt`."""

    prompt: Annotated[
        str,
        BeforeValidator(
            lambda text: text[0] if isinstance(text, list) and len(text) == 1 else text
        ),
    ] = Field(min_length=1)


class ChatRequest(ReplyRequest):
    """A request for a reply in a chat, with the fields of OpenAI's chat completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MANY)
    logprobs: bool = False
    tools: list[Tool] = Field(default=[], max_length=_MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    sirchat_ask: OwnSession | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that the request changes for this reply alone, by name."""
        limit = self.max_completion_tokens
        return super().settings() | ({"max_new_tokens": limit} if limit else {})

    @property
    def called_tools(self) -> list[FunctionFields]:
        """The tools of which the reply must call at least one, if `tool_choice` requires a call."""
        if self.tool_choice in ("none", "auto"):
            return []
        name = None if isinstance(self.tool_choice, str) else self.tool_choice.function.name
        return [tool.function for tool in self.tools if name in (None, tool.function.name)]

    @property
    def system(self) -> str | None:
        """The text of the system message, which can only be the first message."""
        first = self.messages[0]
        return first.content if first.role == "system" else None

    @property
    def turns(self) -> Sequence[ChatMessage]:
        """All messages except the system message."""
        return self.messages[self.messages[0].role == "system" :]

    def check(self) -> None:
        """Raise RequestError if messages have a wrong order, or if fields contradict each other."""
        _check_order(self.turns)
        is_free = self.tool_choice in ("none", "auto")
        if not is_free and not self.called_tools:
            raise RequestError("tool_choice names no tool of the request", param="tool_choice")
        if is_free and any(tool.function.strict for tool in self.tools):
            raise RequestError(
                "strict can be had only with a tool_choice that requires a call", param="tools"
            )
        others = self.model_fields_set - {"messages", "stream", "sirchat_ask"}
        if self.sirchat_ask is not None and (others or len(self.messages) > 1):
            raise RequestError("sirchat_ask takes one message alone", param="sirchat_ask")
        if self.tools and self.logprobs:
            raise RequestError("logprobs can't be had with tools", param="logprobs")
        if self.tools and self.response_format.type != "text":
            raise RequestError("response_format can't be had with tools", param="response_format")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens"
            )


Request = TypeVar("Request", bound=Fields)


def parse_request(body: bytes, kind: type[Request]) -> Request:
    """Parse the JSON body of a request of this kind; RequestError for the first problem."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the request's body is not JSON") from None
    if not isinstance(given, dict):
        raise RequestError("the request's body is not a JSON object")
    return make_request(kind, _fields_with_effect(given, kind.model_fields))


def make_request(kind: type[Request], fields: dict[str, Any]) -> Request:
    """Make a request of this kind from its fields; RequestError names the first wrong field."""
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None
    request.check()
    return request


def _fields_with_effect(given: dict[str, Any], offered: Collection[str]) -> dict[str, Any]:
    """The fields of a request that have an effect; `offered` are those that it supports.

    Raises RequestError if an unsupported field of `_NEUTRAL` has a value that would have one.
    """
    kept = {}
    for name, value in given.items():
        is_empty = value is None or (value in ([], {}) and name not in _LISTS)
        if is_empty or name in _WITHOUT_EFFECT:
            continue
        if name in offered or name not in _NEUTRAL:
            kept[name] = value
        elif value not in _NEUTRAL[name]:
            allowed = " or ".join(map(format_value, _NEUTRAL[name]))
            raise RequestError(
                f"{name} can't be {format_value(value)}; allowed: {allowed}",
                param=name,
                code="unsupported_value",
            )
    for name in _LISTS & set(kept):
        if isinstance(kept[name], list):
            kept[name] = [_without_empty(item) for item in kept[name]]
    return kept


def _without_empty(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if value not in (None, [], {})}


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    names = map(str, first["loc"])
    place = ".".join(name for name in names if not name.startswith("literal["))
    if first["type"] == "extra_forbidden":
        return RequestError(f"{place} is not supported", param=place, code="unsupported_parameter")
    value = "" if first["type"] == "missing" else f" (not {format_value(first['input'])})"
    return RequestError(f"{place}: {first['msg']}{value}", param=place)


def _check_order(turns: Sequence[ChatMessage]) -> None:
    before, open_calls = "system", set[str]()
    for number, message in enumerate(turns):
        where = f"message {number + 1} after the system message"
        problem = ""
        if message.role == "system":
            problem = "a system message must be the first message"
        elif message.role == "tool" and message.tool_call_id not in open_calls:
            problem = (
                f"{where} answers the call {format_value(message.tool_call_id)}, but the reply "
                "before has no such call, or it is answered already"
            )
        elif message.role != "tool" and open_calls:
            problem = f"{where} must be what the tool returned for the call {min(open_calls)}"
        elif message.role == "assistant" and before not in ("user", "tool"):
            problem = f"{where} is of the assistant, but follows no user message"
        if problem:
            raise RequestError(problem, param="messages")
        open_calls.discard(message.tool_call_id or "")
        open_calls |= {call.id for call in message.tool_calls}
        before = message.role
    if before not in ("user", "tool") or open_calls:
        raise RequestError(
            "the last message must be a user message, or what the called tools returned",
            param="messages",
        )
