"""The fields of requests that describe tools and their calls, and how all fields are checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

_DEEPEST = 64  # most levels of nested lists and objects


class Fields(BaseModel):
    """Base class of requests and their parts; a field that a class does not have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise RequestError if the values of some fields contradict each other."""


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""The name of a tool."""

CallId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:|/-]{1,256}$")]
"""The id of a call of a tool."""


def shallow(value: Any) -> Any:
    """Return a JSON value unchanged, unless its lists and objects are nested too deeply.

    In that case, raise PydanticCustomError.
    """
    level = [value]
    for _ in range(_DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for many in inner if not isinstance(many, _PLAIN) for one in many]
        if not level:
            return value
    raise PydanticCustomError("deep", "lists and objects are nested too deeply")


_PLAIN = str | int | float | None
Json = Annotated[dict[str, Any], BeforeValidator(shallow)]


class FunctionCall(Fields):
    """The tool that a reply calls, and the call's arguments, which are JSON text.

    `parsed_arguments` is ignored; OpenAI's client adds this field to calls that it sends back.
    """

    name: Name
    arguments: str
    parsed_arguments: Any = None


class CallFields(Fields):
    """A call of a tool in a reply; `index`, a field of streamed calls, is ignored."""

    index: int | None = None
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
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionFields


class ToolName(Fields):
    """The name of a tool."""

    name: Name


class NamedTool(Fields):
    """The tool that the reply must call."""

    type: Literal["function"]
    function: ToolName
