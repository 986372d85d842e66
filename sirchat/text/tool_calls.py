"""Tool calls: finds them in replies, in each form that models write, and converts histories.

In forms other than JSON the values are texts; the schema of the tool's parameters says which types
they have.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sirchat.text.text_file import without_surrogates

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
PYTHON = "<|python_tag|>"  # before the calls of some Llamas

# In JSON in tags: where a text begins or ends; the tag that ends it, unless in a text; an escape.
_MARKS = re.compile(rf'"|{CALL_CLOSE}|\\.', re.DOTALL)
_BARE = ('{"name"', '[{"name"', FUNCTION)  # how calls without tags begin
_FENCE, _FENCED = "```json", re.compile(r"```json\s*(.*?)\s*```", re.DOTALL)  # as some write it
_HALF_TAG = re.compile(r"<[^<>\s]*\Z")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_DEPTH = 64  # levels of lists and objects in JSON


def _finite(written: str) -> float | None:
    return number if math.isfinite(number := float(written)) else None


# JSON has no NaN and no infinite numbers, which models may write; they become null.
JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        """This call in the JSON form of OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def result(self, text: str) -> dict[str, str]:
        """The result of the call as a message for chat templates."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": text}


class CallParser:
    """Separates tool calls from the text of a reply while it is generated.

    Calls stand in tags, as Hermes and Qwen write them, or the whole reply consists of calls, as
    with Llama, perhaps in a code block; the latter must be of tools in `names`, which may map tools
    to their parameters' schemas. Ids count from `number`. After the `known_arguments` of a tool, an
    unknown argument ends the call. With `single_call`, the reply ends after its first call;
    `is_cut` says whether more was left out.
    """

    def __init__(
        self,
        names: Collection[str],
        number: int,
        *,
        single_call: bool = False,
        known_arguments: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._names = names
        self._schemas: Schemas = {name: {} for name in names}
        if isinstance(names, Mapping):
            self._schemas = names
        self._known_arguments = known_arguments or {}
        self._bare = (*_BARE, *(f"[{name}(" for name in names))
        self._number = number
        self._single_call = single_call
        self.is_cut = False
        self._waiting = ""
        # Up to where in the call that waits its end was sought, and whether that is in a text.
        self._tried, self._is_in_text = 0, False
        self._marked: str | None = ""
        self._has_begun = False
        self.calls: list[ToolCall] = []

    @property
    def has_ended(self) -> bool:
        """Whether the reply must end, because only one call is allowed and it is complete."""
        return self._single_call and bool(self.calls)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add a piece of the reply; returns the new text outside calls, and new complete calls."""
        self._waiting += text
        start = self._waiting.lstrip()
        if not self._has_begun and _begins(start, ("{", PYTHON, _FENCE, *self._bare)):
            return "", []  # only its end shows whether this is a call
        self._has_begun = True
        before = len(self.calls)
        shown = "".join(iter(self._next, None))
        return shown, self.calls[before:]

    def hold_back(self, text: str) -> bool:
        """Whether `text` is held back because it belongs to calls between control tokens."""
        if self._marked == "" and text.startswith(CALL_OPEN):
            self._marked = None  # they have tags
        if self._marked is not None:
            self._marked += text
        return self._marked is not None

    def finish(self, lead: str = "", *, is_short: bool = False) -> tuple[str, list[ToolCall]]:
        """The text and the calls that were held back, at the reply's end.

        `lead` stands before the names of calls. `is_short`: the reply was cut, and half a call is
        no text.
        """
        before = len(self.calls)
        if self.has_ended:
            self.is_cut = bool(self._waiting.strip())
            return "", []
        shown, left = self.push("")[0], self._waiting
        is_call = False
        if left.lstrip().startswith(CALL_OPEN):
            is_call = self._add(left.lstrip().removeprefix(CALL_OPEN))
        elif not self._has_begun:
            is_call = self._add(left.strip(), is_tagged=False)
        if is_call or (self.calls and not left.strip()):
            left = ""
        if self._marked and not self.parse_marked(self._marked, lead) and not is_short:
            left += self._marked
        begun = left.strip()
        written = begun.removeprefix(PYTHON).strip()
        is_bare = not self._has_begun and _begins(written, self._bare)
        if is_short and begun and (is_bare or _begins(begun, (CALL_OPEN,))):
            left = ""
        return shown + left, self.calls[before:]

    def parse_marked(self, marked: str, lead: str) -> list[ToolCall]:
        """The calls in `marked`, a text with control tokens; [] if it has anything else.

        `lead` stands before each name, if names are not in the JSON of the calls.
        """
        if _OF_GEMMA.match(marked):
            calls: list[Any] = list(_gemma_calls(marked))
        else:
            parts = map(str.strip, _BETWEEN.split(marked))
            calls = [call for part in parts for call in non_json_calls(part, self._schemas)]
        before, marked = len(self.calls), marked.lstrip()
        if marked.startswith(PYTHON):  # code, or JSON that stands alone
            self._add(marked)
            return self.calls[before:]
        at = done = len(marked) if calls else 0
        while found := re.compile(r"[{\[]").search(marked, at):
            try:
                value, end = JSON.raw_decode(marked, found.start())
            except (ValueError, RecursionError):  # such as for the `[` of a mark
                at = found.end()
                continue
            names = re.findall(rf"{re.escape(lead)}([\w.-]+)", marked[done : found.start()])
            if lead and names:
                value = {"name": names[-1], "arguments": value}
            calls += value if isinstance(value, list) else [value]
            at = done = end
        self._add("\n".join(map(json.dumps, calls)))
        return self.calls[before:]

    def _next(self) -> str | None:
        """Take text or a call from the waiting text; returns the text to show, or None to wait."""
        if self.has_ended:
            return None
        text = self._waiting
        lead, tag, inside = text.partition(CALL_OPEN)
        if tag:
            if before := lead.rstrip():
                return self._take(len(before))
            if self._ends_before_unknown():
                self._waiting = ""
                return ""
            inner = self._inside(inside)
            if inner is None:
                return None
            end = len(lead) + len(CALL_OPEN) + len(inner) + len(CALL_CLOSE)
            if not self._add(inner):
                return self._take(end)
            self._waiting = text[end:].lstrip()
            return ""
        half = _HALF_TAG.search(text)  # blanks before a call are not shown
        is_tag = half and CALL_OPEN.startswith(half[0])
        return self._take(len(text[: half.start() if half and is_tag else None].rstrip())) or None

    def _take(self, size: int) -> str:
        taken, self._waiting = self._waiting[:size], self._waiting[size:]
        return taken

    def _inside(self, text: str) -> str | None:
        """The text within the tags of the waiting call; None if the call has no end yet."""
        if _BEGINNINGS.match(text):  # a call with arguments that are not JSON
            while (end := text.find(CALL_CLOSE, self._tried)) >= 0:
                if non_json_calls(text[:end], self._schemas):
                    self._tried = 0
                    return text[:end]
                self._tried = end + 1
            call, _, others = text.partition(CALL_CLOSE)
            if CALL_OPEN not in others:
                return None
            self._tried = 0  # the next call begins: this is none
            return call
        if CALL_CLOSE not in text:
            return None
        while mark := _MARKS.search(text, self._tried):
            if mark[0] == CALL_CLOSE and not self._is_in_text:
                self._tried = 0
                return text[: mark.start()]
            self._is_in_text ^= mark[0] == '"'
            self._tried = mark.end()
        # Half a mark may stand at the end.
        self._tried = max(self._tried, len(text) - len(CALL_CLOSE))
        return None

    def _ends_before_unknown(self) -> bool:
        """Whether the waiting call has an unknown argument; if so, adds the call without it."""
        written = self._waiting.lstrip().removeprefix(CALL_OPEN)
        named = re.match(r'\s*\{"name": "([\w-]+)"', written) if self._known_arguments else None
        if named is None or named[1] not in self._known_arguments:
            return False
        keys = re.finditer(r',\s*"([^"\\]*)"\s*:', written[named.end() + 1 :])
        unknown = (key.start() for key in keys if key[1] not in self._known_arguments[named[1]])
        ends = [named.end() + 1 + start for start in unknown]
        return any(self._add(written[:end] + "}}") for end in ends[:1])

    def _add(self, written: str, *, is_tagged: bool = True) -> bool:
        """Add the calls in `written`; returns False, and adds nothing, if there is other text."""
        calls: list[ToolCall] = []
        left = written.strip().removeprefix(PYTHON).strip()
        if fenced := _FENCED.fullmatch(left):
            left = fenced[1]
        is_word = not is_tagged and left in self._schemas  # a tool's name alone
        values: list[Any] = [] if is_word else non_json_calls(left, self._schemas)
        left = "" if values else left
        while left:
            try:
                value, end = JSON.raw_decode(left)
            except (ValueError, RecursionError):
                return False
            values += value if isinstance(value, list) else [value]
            left = left[end:].lstrip().removeprefix(";").lstrip()
        for call in values:
            if is_too_deep(call):
                return False
            arguments = isinstance(call, dict) and call.get("arguments", call.get("parameters"))
            name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
            if isinstance(arguments, str):
                arguments = _parse_arguments(arguments)
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return False
            if fenced and set(call) != {"name", "arguments"}:  # such as one with its result
                return False
            if name not in self._names and not (is_tagged and _NAME.fullmatch(name)):
                return False
            made = without_surrogates(json.dumps(arguments, ensure_ascii=False))
            text = json.dumps(json.loads(made))
            calls.append(ToolCall(call_id(self._number + len(calls)), name, text))
        if self._single_call and len(calls) > 1:
            calls, self.is_cut = calls[:1], True
        self._number += len(calls)
        self.calls += calls
        return bool(calls)


def call_id(number: int) -> str:
    return f"call{number:05}"


def calls_key(text: str, calls: Iterable[ToolCall]) -> str:
    """A reply that calls tools as JSON, independent of a client's blanks and order of arguments."""
    written = [[call.id, call.name, _parse_arguments(call.arguments)] for call in calls]
    key = json.dumps([text.strip(), written], ensure_ascii=False, sort_keys=True)
    return without_surrogates(key)


def calls_from_key(key: str) -> tuple[str, list[dict[str, Any]]]:
    """The text and the calls in a key of `calls_key`, in the form for chat templates."""
    text, calls = json.loads(key)
    return text, [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
        for ident, name, arguments in calls
    ]


def calls_as_text(content: str, functions: Iterable[dict[str, Any]]) -> str:
    """The text `content`, then the calls of `functions` in the format of Hermes and Qwen."""
    written = [
        f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
        for function in functions
    ]
    return "\n".join([content, *written] if content else written)


def append_calls(content: str, calls: object) -> str:
    """A reply's text, then a message's `tool_calls`, which have the form of OpenAI's API."""
    functions = list[dict[str, Any]]()
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            given = function.get("arguments", {})
            given = _parse_arguments(given) if isinstance(given, str) else given
            functions.append({"name": function["name"], "arguments": given})
    return calls_as_text(content, functions)


def results_from_json(text: str) -> list[dict[str, str]]:
    """Tool results in the form for chat templates, from JSON with ids, names and texts."""
    return [
        {"role": "tool", "tool_call_id": ident, "content": said} | ({"name": name} if name else {})
        for ident, name, said in json.loads(text)
    ]


def is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [
            each for item in nested for each in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _begins(text: str, openings: tuple[str, ...]) -> bool:
    """Whether the text begins with an opening, or could do so when more text follows."""
    return text.startswith(openings) or any(one.startswith(text) for one in openings)


def _parse_arguments(arguments: str) -> Any:
    """The arguments of a call; the text itself if it is not valid JSON."""
    try:
        value = JSON.decode(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_too_deep(value) else value


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
