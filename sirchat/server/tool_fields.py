"""The fields of requests that concern tools, and how fields are checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

_DEEPEST = 64  # lists and objects in each other


class Fields(BaseModel):
    """Fields of a request; others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise RequestError if fields don't go together."""


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""The name of a tool."""

CallId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:|/-]{1,256}$")]
"""The id of a call."""


def shallow(value: Any) -> Any:
    """A value of JSON; refused if its lists and objects are nested too deeply."""
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
    """What a reply calls: a tool, and its arguments, as JSON.

    `parsed_arguments`, which OpenAI's client adds to what it sends back, change nothing.
    """

    name: Name
    arguments: str
    parsed_arguments: Any = None


class CallFields(Fields):
    """A call in a reply; `index`, which streams have, changes nothing."""

    index: int | None = None
    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionFields(Fields):
    """A function that the model may call; its parameters are a JSON schema."""

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
