"""The fields of requests that describe tools and their calls, and the base class of all fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

_DEEPEST = 64  # most levels of nested lists and objects


class Fields(BaseModel):
    """Base class of requests and their parts; it refuses fields that a subclass does not define."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise RequestError if the values of some fields contradict each other.

        This base class has no fields, so it does nothing.
        """


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""The type of a field with a name, such as the name of a tool."""

CallId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:|/-]{1,256}$")]
"""The type of the id of a call of a tool."""


def shallow(value: Any) -> Any:
    """Return a JSON value unchanged, if its lists and objects are not nested too deeply.

    Raises PydanticCustomError if they are.
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
    """The field `function` of a tool call: the tool's name, and the arguments as JSON text.

    The field `parsed_arguments` is ignored; OpenAI's client adds it to calls that it sends back.
    """

    name: Name
    arguments: str
    parsed_arguments: Any = None


class CallFields(Fields):
    """A tool call in a message of the assistant.

    The field `index`, which the calls of a streamed reply have, is ignored.
    """

    index: int | None = None
    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionFields(Fields):
    """A function that the model may call: its name, description, and parameters (a JSON schema)."""

    name: Name
    description: str | None = None
    parameters: Json = {"type": "object", "properties": {}}
    strict: bool | None = None


class Tool(Fields):
    """An item of the field `tools`: a tool that the model may call."""

    type: Literal["function"]
    function: FunctionFields


class ToolName(Fields):
    """An object whose only field is the name of a tool."""

    name: Name


class NamedTool(Fields):
    """The field `tool_choice`, if it names the tool that the reply must call."""

    type: Literal["function"]
    function: ToolName
