"""Calls of tools as some models write them, in other forms than JSON.

Values are texts there; the schema of the tool's parameters says of which type they are.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_MOST_NESTED = 1000  # brackets that Python's parser gets
FUNCTION = "<function="  # how a call may begin without tags around it
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool, by its name

# A call, with its name and arguments, and an argument, with its name and value. Where a value has
# the mark of its end in its text, only what may follow tells which one ends it.
_FORMS = [
    (re.compile(call, re.DOTALL), re.compile(argument, re.DOTALL))
    for call, argument in (
        (  # Qwen3-Coder, Nemotron 3, Seed-OSS
            r"\s*<function=([\w.-]+)>(.*?)</function>(?=\s*(?:<function=|\Z))\s*",
            r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))\s*",
        ),
        (  # GLM 4.5 to 4.7
            r"\s*([\w.-]{1,64}+)\s*(<arg_key>.*|)\Z",
            r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))\s*",
        ),
    )
]
_BEGINNINGS = re.compile(r"\s*+(?:<function=|[\w.-]{1,64}+\s*+<arg_key>)")


def _finite(written: str) -> float | None:
    return number if math.isfinite(number := float(written)) else None


# JSON has no NaN and no infinite numbers, which models may write; they become null.
JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def begins_call(text: str) -> bool:
    """Whether a text, up to where it is, begins like a call with arguments."""
    return _BEGINNINGS.match(text) is not None


def other_calls(text: str, tools: Schemas) -> list[dict[str, Any]]:
    """The calls that a text consists of, with `name` and `arguments`; [] if it is none.

    A name alone is a call only of a tool in `tools`.
    """
    for of_call, of_argument in _FORMS:
        calls, at = [], 0
        while at < len(text) and (call := of_call.match(text, at)):
            arguments = _arguments(of_argument, call[2], tools.get(call[1], {}))
            if arguments is None or (call[2] == "" and call[1] not in tools):
                break
            calls.append({"name": call[1], "arguments": arguments})
            at = call.end()
        if calls and at == len(text):
            return calls
    return _python_calls(text)


def _arguments(
    form: re.Pattern[str], text: str, schema: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call; None if the text has others than these."""
    found, at, known = dict[str, Any](), 0, schema.get("properties")
    known = known if isinstance(known, dict) else {}
    while at < len(text.rstrip()):
        if (argument := form.match(text, at)) is None:
            return None
        name = argument[1].strip()
        found[name], at = _typed(argument[2], known.get(name, {})), argument.end()
    return found


def _typed(text: str, schema: Any) -> Any:
    """The value of a text by its schema: other types are JSON, or as Python writes them."""
    if _may_be_text(schema):
        return text
    try:
        return JSON.decode({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def _may_be_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds, values = schema.get("type"), [schema.get("const")]
    values += schema["enum"] if isinstance(schema.get("enum"), list) else []
    parts = [schema.get(name) for name in ("anyOf", "oneOf", "allOf")]
    others = [part for some in parts if isinstance(some, list) for part in some]
    is_text = "string" in (kinds if isinstance(kinds, list) else [kinds])
    return is_text or any(isinstance(one, str) for one in values) or any(map(_may_be_text, others))


def _python_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a list of Python (LFM2), such as `[weather(city="Oslo")]`."""
    if text[:1] != "[" or sum(map(text.count, "[({")) > _MOST_NESTED:
        return []
    try:
        made: Any = ast.parse(text, mode="eval").body
        return [
            {"name": ast.unparse(call.func), "arguments": _keywords(call)} for call in made.elts
        ]
    except (ValueError, SyntaxError, TypeError, AttributeError, RecursionError, MemoryError):
        return []


def _keywords(call: Any) -> Any:
    """The arguments of a call in Python, as JSON has them; ValueError if one has no name."""
    if call.args or any(one.arg is None for one in call.keywords):
        raise ValueError("an argument without a name")
    found = {one.arg: ast.literal_eval(_FromJson().visit(one.value)) for one in call.keywords}
    return JSON.decode(json.dumps(found))


class _FromJson(ast.NodeTransformer):
    """Takes the names that JSON has for values as those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node
