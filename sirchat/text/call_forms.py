"""Tool calls that some models write in forms other than JSON.

The values in them are texts; the schema of the tool's parameters says which types they have.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

_MAX_BRACKETS = 1000  # brackets that Python's parser gets
FUNCTION = "<function="  # how a call may begin without tags around it
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool, by its name

# What stands around calls: tags, which some models have as control tokens.
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

# A call, with its name and what it gets, and an argument, with its name and value. Where a value
# has the mark of its end in its text, only what may follow tells which one ends it.
_FORMS = [
    (re.compile(call, re.DOTALL), re.compile(argument, re.DOTALL))
    for call, argument in (
        (  # Qwen3-Coder, Nemotron 3, Seed-OSS; with JSON in place of arguments Llama
            r"\s*<function=([\w.-]+)>(.*?)</function>(?=\s*(?:<function=|\Z))\s*",
            r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            r"(?=\s*(?:<parameter=|\Z))\s*",
        ),
        (  # GLM 4.5 to 4.7
            r"\s*([\w.-]{1,64}+)\s*(<arg_key>.*|)\Z",
            r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            r"(?=\s*(?:<arg_key>|\Z))\s*",
        ),
    )
]
_BEGINNINGS = re.compile(r"\s*+(?:<function=|[\w.-]{1,64}+\s*+<arg_key>)")
_GEMMA = re.compile(r"call:(?P<name>[\w.-]+)\s*(?=\{)")  # before the arguments of a call of Gemma 4
_OF_GEMMA = re.compile(rf"\s*(?:<\|tool_call>\s*)?{_GEMMA.pattern}")
_BETWEEN = re.compile(r"<\|tool_call_(?:start|end)\|>")  # around calls of LFM2
# In a call of Gemma 4: its name, a text, or what stands before a colon.
_UNQUOTED = re.compile(
    rf'({_GEMMA.pattern})|<\|"\|>(.*?)<\|"\|>|(?<=[{{,])([^{{}}\[\],:<"]+)(?=:)', re.DOTALL
)
# In Python: a text; a name, which may have a hyphen or be a word of Python's own; a value of JSON.
_NAMES = re.compile(
    r"""("(?:\\.|[^"\\])*+"?|'(?:\\.|[^'\\])*+'?)|(?<![\w.-])([^\W\d][\w.-]*+)(?=\s*+[(=])"""
    r"|(?<![\w.-])(true|false|null)(?![\w.-])",
    re.DOTALL,
)


def _finite(written: str) -> float | None:
    return number if math.isfinite(number := float(written)) else None


# JSON has no NaN and no infinite numbers, which models may write; they become null.
JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def begins_non_json_call(text: str) -> bool:
    """Whether a text, which may be incomplete, begins like a call with arguments."""
    return _BEGINNINGS.match(text) is not None


def non_json_calls(text: str, tools: Schemas) -> list[dict[str, Any]]:
    """The calls that a text consists of, as `name` and `arguments`; [] if it is anything else.

    A name without arguments is a call only if `tools` has that tool.
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
    return _python_calls(text, tools)


def control_token_calls(text: str, tools: Schemas) -> list[dict[str, Any]]:
    """The calls in a text that has control tokens and is not JSON; [] if there are none."""
    if _OF_GEMMA.match(text):
        return list(_gemma_calls(text))
    return [call for part in _BETWEEN.split(text) for call in non_json_calls(part.strip(), tools)]


def _gemma_calls(text: str) -> Iterator[dict[str, Any]]:
    """The calls of Gemma 4, such as `call:weather{city:<|"|>Oslo<|"|>,days:3}`."""
    written = _UNQUOTED.sub(lambda part: part[1] or json.dumps(part[4] or part[3]), text)
    at = 0
    while call := _GEMMA.search(written, at):
        try:
            arguments, at = JSON.raw_decode(written, call.end())
        except (ValueError, RecursionError):
            return
        yield {"name": call["name"], "arguments": arguments}


def _arguments(
    form: re.Pattern[str], text: str, schema: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call; None if the text has anything but arguments of this `form`."""
    found, at, known = dict[str, Any](), 0, schema.get("properties")
    known = known if isinstance(known, dict) else {}
    if text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            given = JSON.decode(text)
            return given if isinstance(given, dict) else None
    while at < len(text.rstrip()):
        if (argument := form.match(text, at)) is None:
            return None
        name, at = argument["name"].strip(), argument.end()
        found[name] = _typed(argument["value"], known.get(name, {}))
    return found


def _typed(text: str, schema: Any) -> Any:
    """Convert an argument's text by its schema; types other than text are JSON or Python values."""
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


def _python_calls(text: str, tools: Collection[str]) -> list[dict[str, Any]]:
    """The calls in Python lists (LFM2), such as `[weather(city="Oslo")]`."""
    if text[:1] != "[" or sum(map(text.count, "[({")) > _MAX_BRACKETS:
        return []
    names = list[str]()

    def numbered(part: re.Match[str]) -> str:
        names.extend(filter(None, [part[2]]))
        return part[1] or (f"n{len(names) - 1}" if part[2] else str(json.loads(part[3])))

    try:
        body = ast.parse(_NAMES.sub(numbered, text)).body
        lists: list[Any] = [line.value for line in body if isinstance(line, ast.Expr)]
        found = [
            {"name": names[int(call.func.id[1:])], "arguments": _keywords(call, names)}
            for one in lists
            for call in one.elts
        ]
    except (
        *(ValueError, SyntaxError, TypeError, AttributeError, LookupError),
        *(RecursionError, MemoryError),
    ):
        return []
    is_all = len(lists) == len(body) and all(call["name"] in tools for call in found)
    return found if is_all else []  # other code is not done in part


def _keywords(call: Any, names: Sequence[str]) -> Any:
    """The arguments of a Python call as JSON values; raises ValueError if one has no name."""
    if call.args or any(one.arg is None for one in call.keywords):
        raise ValueError("an argument without a name")
    given = {names[int(one.arg[1:])]: ast.literal_eval(one.value) for one in call.keywords}
    return JSON.decode(json.dumps(given))
