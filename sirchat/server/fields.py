"""What the fields of all requests have in common: how they are checked and refused."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sirchat.errors import format_value, on_one_line
from sirchat.text.text_file import without_surrogates
from sirchat.text.tool_calls import is_too_deep

MAX_BODY_BYTES = 16 * 2**20  # of a request's body
MAX_MESSAGES = 10_000
MAX_TOKEN_LIMIT = 10**9  # the highest `max_tokens` that a request may give

# Fields that ask for another kind of answer: refused, unless they have one of these values. Any
# other unknown field has no effect, which the header `X-Sirchat-Note` says.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "background": (False,),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    **dict.fromkeys(("functions", "logit_bias", "prompt", "images", "audio", "dimensions"), ()),
    **dict.fromkeys(("grammar", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("guided_choice", "json_schema", "structured_outputs"), ()),
}
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})
# Values by which clients say, beside null, that a field is not given.
_UNSET_VALUES: dict[str, tuple[Any, ...]] = {
    "seed": (-1,),
    "top_k": (0, -1),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), (-1,)),
    **dict.fromkeys(("stop", "reasoning_effort"), ("",)),
}

# The parts of a message's content that are read, and where each has its text.
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Anthropic's names of errors, by their status; others are `invalid_request_error` or `api_error`.
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """A request can't be answered; `body` is the JSON of the response, in OpenAI's form."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message, param = on_one_line(message), param and on_one_line(param)  # may name fields
        super().__init__(message)
        self.status = status
        error_type = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": error_type, "param": param, "code": code}
        self.body = {"error": error}
        self.headers = headers or {}

    def body_for(self, path: str) -> dict[str, Any]:
        """The JSON of the response at a path, in the form of its API."""
        if path.endswith(("/messages", "/count_tokens")):
            default_type = "invalid_request_error" if self.status < 500 else "api_error"
            error = {"type": _ANTHROPIC_ERRORS.get(self.status, default_type), "message": str(self)}
            return {"type": "error", "error": error}
        return self.body


def join_text_parts(content: Any) -> Any:
    """Join a list of text parts; raises PydanticCustomError for parts of other kinds."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text_field = _TEXT_FIELDS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if text_field is None or not isinstance(part.get(text_field), str):
            raise PydanticCustomError("content", "only text is read: no images, audio or files")
        texts.append(part[text_field])
    return "\n".join(texts)


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")]
CallId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:|/=+@~-]{1,256}$")]


class RequestObject(BaseModel):
    """Base class of requests and of the objects in them; unknown fields have no effect.

    Raises PydanticCustomError for fields that ask for another kind of answer.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_unset(cls, fields: Any) -> Any:
        """Keep the fields that are set; whole numbers may be written as fractions."""
        if not isinstance(fields, dict):
            return fields
        model_fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        set_fields = {}
        for name, value in fields.items():
            if name in _REFUSED_UNLESS and name not in model_fields:
                if value not in (*EMPTY_VALUES, *_REFUSED_UNLESS[name]):
                    raise _unsupported(name, value)
                continue
            if value is None or value in _UNSET_VALUES.get(name, ()):
                continue
            is_integer = name in model_fields and model_fields[name].annotation == int | None
            if is_integer and isinstance(value, float) and value.is_integer():
                value = int(value)
            set_fields[name] = value
        return set_fields

    def check(self) -> None:
        """Raise RequestError if the values of some fields contradict each other."""


def _unsupported(name: str, value: Any) -> PydanticCustomError:
    """The error for a field that asks for something the server can't do."""
    allowed = " or ".join(map(format_value, _REFUSED_UNLESS[name]))
    problem = f"can't be {format_value(value)}; allowed: {allowed}" if allowed else "can't be had"
    return PydanticCustomError("unsupported", "{problem}", {"problem": problem, "field": name})


Request = TypeVar("Request", bound=RequestObject)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a body that is a JSON object; raises RequestError if it is something else."""
    try:
        value = json.loads(body, parse_float=_finite_number, parse_constant=_finite_number)
        if b"\\u" in body or b"\xed" in body:  # may have lone surrogates
            value = json.loads(without_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        raise RequestError("the request's body is not JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the request's body is not a JSON object")
    if is_too_deep(value):
        raise RequestError("lists and objects of the request are nested too deeply")
    return value


def _finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise RequestError(f"the request has the number {text[:30]}; allowed: finite numbers")
    return number


Fields = dict[str, Any]  # of a JSON object
Value = TypeVar("Value", str, dict[str, Any], list[Any])


def checked(value: Any, default: Value, place: str) -> Value:
    """The `value` at `place`, or `default` for null; RequestError if it is of another type."""
    if value is None:
        return default
    if not isinstance(value, type(default)):
        what = {dict: "an object", list: "a list"}.get(type(default), "a text")
        raise RequestError(f"{place} must be {what} (not {format_value(value)})", param=place)
    return value


def take_objects(fields: Fields, name: str) -> list[Fields]:
    """Take a list of objects out of `fields`; raises RequestError if it is something else."""
    given = enumerate(checked(fields.pop(name, None), list[Any](), name))
    return [dict(checked(each, Fields(), f"{name}.{number}")) for number, each in given]


def take_options(fields: Fields, name: str, known: Collection[str]) -> Fields:
    """Take an object out of `fields`; what is not `known` of it stays there, as `NAME.OPTION`."""
    options = checked(fields.pop(name, None), Fields(), name)
    fields |= {f"{name}.{key}": each for key, each in options.items() if key not in known}
    return {key: each for key, each in options.items() if key in known}


def make_request(
    kind: type[Request],
    fields: Fields,
    *place: str | int,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Request:
    """Make a request or its part at `place`; raises RequestError for the first wrong field.

    `names` has what the client calls fields, where it calls them otherwise.
    """
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error, place, names) from None
    request.check()
    return request


def _first_error(
    error: ValidationError, prefix: tuple[str | int, ...], names: Mapping[str, str]
) -> RequestError:
    detail = error.errors(include_url=False)[0]
    parts = [str(n) for n in (*prefix, *detail["loc"]) if not str(n).startswith("literal[")]
    parts[:1] = [names.get(first, first) for first in parts[:1]]
    if detail["type"] == "unsupported":
        place = ".".join([*parts, detail["ctx"]["field"]])
        problem = f"{place} {detail['msg']}"
        return RequestError(problem, param=place, code="unsupported_value")
    place, value = ".".join(parts), format_value(detail["input"])
    if detail["type"] == "extra_forbidden":
        return RequestError(f"{place} is not supported", param=place, code="unsupported_parameter")
    shown = "" if detail["type"] == "missing" else f" (not {value})"
    return RequestError(f"{place}: {detail['msg']}{shown}", param=place)
