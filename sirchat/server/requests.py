"""The fields of requests for a reply, and the checks of their values.

A value that the server can't obey is refused, not ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sirchat.errors import format_value
from sirchat.memory.policies import is_path
from sirchat.server.tool_fields import (
    CallFields,
    CallId,
    Fields,
    FunctionFields,
    Json,
    Name,
    NamedTool,
    Tool,
)

MOST_BYTES = 16 * 2**20
"""Largest size of a request's body, in bytes."""

MOST_MESSAGES = 10_000
"""Largest number of messages in a request."""

MANY = 10**9
"""Largest number of tokens that a request may give as a limit, such as `max_tokens`."""

_MOST_STOPS = 4
_MOST_TOOLS = 128


class RequestError(Exception):
    """Raised if a request can't be answered; the client gets this error as the HTTP response.

    Attributes:
        status: the status code of the HTTP response.
        body: the response's JSON, in the format of OpenAI's errors.
        headers: further headers of the response.
    """

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


def joined(content: Any, kinds: Sequence[str] = ("text",), extra: Sequence[str] = ()) -> Any:
    """Convert a message's `content`, a text or a list of text parts, to one text.

    Parts are joined by line breaks. `kinds` are the types that a part may have; `extra` are names
    of further fields of parts, which are ignored. Anything but a list is returned unchanged. Raises
    PydanticCustomError for a part that is not text.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in kinds
        if not is_text or set(part) - {*extra} != {"type", "text"} or type(part["text"]) is not str:
            raise PydanticCustomError("content", "only text is read: no images, audio or files")
    return "\n".join(part["text"] for part in content)


def _only(prompt: Any) -> Any:
    """Return the only item of a list with one prompt; return anything else unchanged."""
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class ChatMessage(Fields):
    """One message in the field `messages` of a chat request.

    The field `parsed` is ignored; OpenAI's client adds it to replies that it sends back.
    """

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str | None, BeforeValidator(joined)] = None
    tool_calls: list[CallFields] = Field(default=[])
    tool_call_id: CallId | None = None
    name: Name | None = None
    parsed: Any = None

    @property
    def text(self) -> str:
        """The message's text; "" if the message has only calls of tools."""
        return self.content or ""

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        """Check that the message has text or calls, and only fields that its role may have.

        Returns the message, or raises PydanticCustomError.
        """
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
    """The field `json_schema` of a reply's format: a named JSON schema that the reply must match.

    The model does not see the schema's name.
    """

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
    """The field `sirchat` of a request: settings of the conversation's memory.

    None means that the request does not set the value. The conversation then uses the value that
    was set for it before, or else the server's value.
    """

    policy: str | None = None
    budget: int | None = None
    decay: float | str | None = None
    recall: str | None = None

    @field_validator("policy")
    @classmethod
    def _without_code(cls, name: str | None) -> str | None:
        """Refuse a policy `module:Class`, because the server would run code that a client chose.

        Returns any other name of a policy unchanged.
        """
        if name is not None and is_path(name):
            raise PydanticCustomError("policy", "a request can't name a policy of your own")
        return name

    def given(self) -> dict[str, Any]:
        """The memory settings that the request sets, which are those that are not None, by name."""
        return self.model_dump(exclude_none=True)


class ReplyRequest(Fields):
    """Base class of requests for a reply: the fields that chat requests and text requests have.

    The limits of sampling settings are those of the server's own settings; `ChatServer` checks
    them.
    """

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
        BeforeValidator(_listed),
        Field(max_length=_MOST_STOPS),
    ] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    sirchat: MemorySettings = MemorySettings()

    def settings(self) -> dict[str, Any]:
        """The values, by name, of the settings that the request changes for this reply alone."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        given["max_new_tokens"] = self.most_tokens
        return {name: value for name, value in given.items() if value is not None}

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens that the reply may have; None for the server's setting."""
        return self.max_tokens


class TextRequest(ReplyRequest):
    """The body of a request to `/v1/completions`: the model continues the text `prompt`."""

    prompt: Annotated[str, BeforeValidator(_only)] = Field(min_length=1)


class ChatRequest(ReplyRequest):
    """A request for a reply in a chat, with the fields of OpenAI's chat completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MANY)
    logprobs: bool = False
    tools: list[Tool] = Field(default=[], max_length=_MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens that the reply may have; None for the server's setting."""
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        """Raise RequestError if messages have a wrong order, or if fields contradict each other."""
        _check_order(self.turns)
        self._check_tools()
        if self.tools and self.logprobs:
            raise RequestError("logprobs can't be had with tools", param="logprobs")
        if self.tools and self.response_format.type != "text":
            raise RequestError("response_format can't be had with tools", param="response_format")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens"
            )

    def _check_tools(self) -> None:
        """Raise RequestError if a required tool does not exist, or if `strict` can't be obeyed.

        A tool's field `strict` can be obeyed only if `tool_choice` requires a call.
        """
        is_free = self.tool_choice in ("none", "auto")
        if not is_free and not self.called_tools:
            raise RequestError("tool_choice names no tool of the request", param="tool_choice")
        if is_free and any(one.function.strict for one in self.tools):
            raise RequestError(
                "strict can be had only with a tool_choice that requires a call", param="tools"
            )

    @property
    def called_tools(self) -> list[FunctionFields]:
        """The tools of which the reply must call at least one, as `tool_choice` requires.

        The list is empty if `tool_choice` requires no call.
        """
        if self.tool_choice in ("none", "auto"):
            return []
        wanted = None if isinstance(self.tool_choice, str) else self.tool_choice.function.name
        return [one.function for one in self.tools if wanted in (None, one.function.name)]

    @property
    def system(self) -> str | None:
        """The text of the first message if it is a system message; else None."""
        first = self.messages[0]
        return first.content if first.role == "system" else None

    @property
    def turns(self) -> Sequence[ChatMessage]:
        """All messages except the system message, which can only be the first message."""
        return self.messages[self.messages[0].role == "system" :]


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")

_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "keep_alive")

_LISTS = {"messages", "input"}

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
"""Fields that some requests do not support, each with the values that change nothing.

An unsupported field with such a value is ignored; with any other value, the request is refused.
"""


Request = TypeVar("Request", bound=Fields)


def parse_request(body: bytes, kind: type[Request]) -> Request:
    """Parse and check the JSON body of a request; returns a request of the class `kind`.

    Raises RequestError for the first problem.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the request's body is not JSON") from None
    if not isinstance(given, dict):
        raise RequestError("the request's body is not a JSON object")
    return checked(kind, _with_effect(given, kind.model_fields))


def checked(kind: type[Request], fields: dict[str, Any]) -> Request:
    """Make a request of the class `kind` with these fields.

    Raises RequestError for the first invalid field.
    """
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None
    request.check()
    return request


def _with_effect(given: dict[str, Any], offered: Collection[str]) -> dict[str, Any]:
    """Return the fields of a request without those that have no effect.

    `offered` are the names of the fields that the server supports. A field has no effect if it is
    empty, such as None, if the server ignores its name, or if `_NEUTRAL` lists its value. Raises
    RequestError if an unsupported field of `_NEUTRAL` has another value.
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
            kept[name] = [
                {key: value for key, value in one.items() if value not in (None, [], {})}
                if isinstance(one, dict)
                else one
                for one in kept[name]
            ]
    return kept


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    names = map(str, first["loc"])
    place = ".".join(name for name in names if not name.startswith("literal["))
    if first["type"] == "extra_forbidden":
        return RequestError(f"{place} is not supported", param=place, code="unsupported_parameter")
    found = "" if first["type"] == "missing" else f" (not {format_value(first['input'])})"
    return RequestError(f"{place}: {first['msg']}{found}", param=place)


def _check_order(turns: Sequence[ChatMessage]) -> None:
    before, open_calls = "system", set[str]()
    for number, one in enumerate(turns):
        where = f"message {number + 1} after the system message"
        if one.role == "system":
            raise RequestError("a system message must be the first message", param="messages")
        if one.role == "tool":
            if one.tool_call_id not in open_calls:
                raise RequestError(
                    f"{where} answers the call {format_value(one.tool_call_id)}, but the reply "
                    "before has no such call, or it is answered already",
                    param="messages",
                )
            open_calls.discard(one.tool_call_id)
        elif open_calls:
            raise RequestError(
                f"{where} must be what the tool returned for the call {min(open_calls)}",
                param="messages",
            )
        if one.role == "assistant" and before not in ("user", "tool"):
            raise RequestError(
                f"{where} is of the assistant, but follows no user message", param="messages"
            )
        open_calls |= {call.id for call in one.tool_calls}
        before = one.role
    if before not in ("user", "tool") or open_calls:
        raise RequestError(
            "the last message must be a user message, or what the called tools returned",
            param="messages",
        )
