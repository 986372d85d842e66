"""Finds calls of tools in replies, and converts calls and results of tools for histories."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sirchat.server.requests import ChatMessage, ChatRequest
from sirchat.server.tool_fields import shallow
from sirchat.text.text_file import without_surrogates

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_PYTHON = "<|python_tag|>"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as in requests


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its id, the tool's name, and the arguments as JSON text."""

    id: str
    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        """This call as a JSON object in the format of OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallParser:
    """Separates the calls of tools in a reply from its text, while the reply is generated.

    Either each call stands in tags, as Hermes and Qwen write it, or the whole reply consists of
    calls, as with Llama.

    Args:
        names: the names of the tools; a call without tags must name one of them.
        number: the number of the next call, from which its id is made.
        only_one: whether the reply ends after its first call.

    Attributes:
        calls: the calls found so far.
        is_cut: whether `only_one` made the parser leave out text or calls after the first call.
    """

    def __init__(self, names: Collection[str], number: int, *, only_one: bool = False) -> None:
        self._names = names
        self._number = number
        self._only_one = only_one
        self.is_cut = False
        self._waiting = ""
        self._has_begun = False
        self.calls: list[ToolCall] = []

    @property
    def are_complete(self) -> bool:
        """Whether the reply must end, because it has the only call that it may have."""
        return self._only_one and bool(self.calls)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add a piece of the reply; returns the text outside calls, and the complete calls.

        Returned text and calls have not been returned before. Text that may belong to a call is
        held back.
        """
        self._waiting += text
        start = self._waiting.lstrip()
        if not self._has_begun and (not start or _begins(start, "{") or _begins(start, _PYTHON)):
            return "", []  # only its end shows whether this is a call
        self._has_begun = True
        before = len(self.calls)
        shown = "".join(iter(self._next, None))
        return shown, self.calls[before:]

    def _next(self) -> str | None:
        """Take the next text or call from the waiting text; returns the text that can be shown.

        For a call, returns "". If the waiting text ends too early to decide, returns None.
        """
        if self.are_complete:
            return None
        at = self._waiting.find(OPEN)
        if at > 0:
            shown, self._waiting = self._waiting[:at], self._waiting[at:]
            return shown.rstrip()
        if at == 0:
            inner, closing, rest = self._waiting[len(OPEN) :].partition(CLOSE)
            if not closing:
                return None
            is_call = self._add(inner)
            self._waiting = rest.lstrip() if is_call else rest
            return "" if is_call else f"{OPEN}{inner}{CLOSE}"
        kept = re.search(r"\s*(<[a-z_]*)?$", self._waiting)
        size = len(kept[0]) if kept and (not kept[1] or OPEN.startswith(kept[1])) else 0
        shown = self._waiting[: len(self._waiting) - size]
        self._waiting = self._waiting[len(shown) :]
        return shown or None

    def rest(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that were held back; call this at the end of the reply."""
        before, left = len(self.calls), self._waiting
        if self.are_complete:
            self.is_cut = bool(left.strip())
            return "", []
        if left.startswith(OPEN):
            is_call = self._add(left.removeprefix(OPEN))
        else:
            is_call = not self._has_begun and self._add(left.strip(), is_tagged=False)
        if is_call or (self.calls and not left.strip()):
            left = ""
        return left, self.calls[before:]

    def _add(self, written: str, *, is_tagged: bool = True) -> bool:
        """Add the calls that the text `written` consists of; returns whether this is possible.

        If the text is empty, or has anything but calls, nothing is added. If `is_tagged` is true, a
        call may name a tool that does not exist.
        """
        found: list[ToolCall] = []
        left = written.strip().removeprefix(_PYTHON).strip()
        while left:
            try:
                call, end = json.JSONDecoder().raw_decode(left)
                shallow(call)
            except (ValueError, RecursionError):
                return False
            arguments = isinstance(call, dict) and call.get("arguments", call.get("parameters"))
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or not isinstance(arguments, dict | str):
                return False
            if name not in self._names and not (is_tagged and _NAME.fullmatch(name)):
                return False
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            found.append(ToolCall(call_id(self._number + len(found)), name, text))
            left = left[end:].lstrip().removeprefix(";").lstrip()
        if self._only_one and len(found) > 1:
            found, self.is_cut = found[:1], True
        self._number += len(found)
        self.calls += found
        return bool(found)


def call_id(number: int) -> str:
    """Make the id of a call from its number in the conversation."""
    return f"call{number:05}"


def _begins(text: str, opening: str) -> bool:
    return text.startswith(opening) or opening.startswith(text)


def calls_in_reply(asked: ChatRequest) -> CallParser | None:
    """Make a parser for calls in the reply to `asked`; None if the reply must not call tools."""
    if not asked.tools or asked.tool_choice == "none":
        return None
    ids = [call.id for one in asked.turns for call in one.tool_calls]
    used = [int(one[4:]) for one in ids if re.fullmatch(r"call[0-9]{5}", one)]
    names = {one.function.name for one in asked.tools}
    only_one = not asked.parallel_tool_calls
    return CallParser(names, max(used, default=-1) + 1, only_one=only_one)


def as_said(messages: Iterable[ChatMessage]) -> list[tuple[str, str]]:
    """Convert messages to pairs of role and text; successive results of tools become one message.

    The role is `user`, `assistant`, `tool` (results) or `calls` (a reply that calls tools). For
    `tool` and `calls`, the text is JSON.
    """
    said: list[tuple[str, str]] = []
    results: list[Any] = []
    names: dict[str, str] = {}
    for one in messages:
        if one.role == "tool":
            name = one.name or names.get(one.tool_call_id or "")
            results.append([one.tool_call_id, name, one.text])
            continue
        if results:
            said.append(("tool", json.dumps(results, ensure_ascii=False)))
            results = []
        calls = [
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in one.tool_calls
        ]
        names |= {call.id: call.name for call in calls}
        said.append(("calls", calls_key(one.text, calls)) if calls else (one.role, one.text))
    if results:
        said.append(("tool", json.dumps(results, ensure_ascii=False)))
    return said


def calls_key(text: str, calls: Iterable[ToolCall]) -> str:
    """Write a reply that calls tools as JSON text.

    The result stays the same if a client changes blanks around the text or in the arguments.
    """
    written = [[one.id, one.name, _value(one.arguments)] for one in calls]
    key = json.dumps([text.strip(), written], ensure_ascii=False, sort_keys=True)
    return without_surrogates(key)


def _value(arguments: str) -> Any:
    """Parse the arguments of a call; returns the text unchanged if it is not valid JSON."""
    try:
        return shallow(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def calls_of(key: str) -> tuple[str, list[dict[str, Any]]]:
    """Read what `calls_key` has written: returns the reply's text, and its calls.

    The calls have the form that chat templates need.
    """
    text, calls = json.loads(key)
    functions = [(ident, {"name": name, "arguments": value}) for ident, name, value in calls]
    return text, [{"id": one, "type": "function", "function": fields} for one, fields in functions]


def results_of(text: str) -> list[dict[str, str]]:
    """Convert results of tools from JSON text, as `as_said` writes it, to messages.

    The messages have the form that chat templates need.
    """
    return [
        {"role": "tool", "tool_call_id": ident, "content": said} | ({"name": name} if name else {})
        for ident, name, said in json.loads(text)
    ]
