"""Templates for other uses than a plain chat: chats with tools, and texts without a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.text.anchors import Anchors
from sirchat.text.reply_parts import SAMPLE_CALL, prefix_length
from sirchat.text.template import (
    ANSWER_TEXT,
    OTHER_TEXTS,
    QUESTION_TEXT,
    STUB_HISTORY,
    STUB_QUESTION,
    Message,
    Template,
    TurnIds,
)
from sirchat.text.tool_calls import CallParser, calls_as_text

_STUB_TOOL: Message = {
    "type": "function",
    "function": {
        "name": QUESTION_TEXT,
        "description": QUESTION_TEXT,
        "parameters": {"type": "object", "properties": {}},
    },
}
# What a model that can't tell when to call may choose instead.
_NO_CALL_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "none",
        "description": "Use this if no other function is needed, to just talk.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROMPTED_TOOLS_NOTE = "the model's chat template takes no tools; a text tells of them instead"
_UNREADABLE_CALLS_NOTE = (
    "the model's chat template writes calls of tools in a form that can't be read: "
    "calls may be shown as text"
)
# As models that know tools are told of them: Hermes and Qwen.
_PROMPT = """You may call functions to answer the user. These are the functions:
<tools>
{}
</tools>
To call a function, write its name and arguments as JSON within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class NoToolsError(ModelError):
    """A model's chat template does not support tools."""


class ToolTemplate(Template):
    """The template of a chat in which the model may call `tools`, which are JSON or "".

    Raises NoToolsError, or ModelError if the tools can't be read.
    """

    def __init__(
        self, tokenizer: Any, anchors: Anchors | None, tools: str = "", ends: Iterable[int] = ()
    ) -> None:
        super().__init__(tokenizer, anchors, ends)
        if ANSWER_TEXT in tools:  # it would be taken for the reply that stands for the history
            raise ModelError(f"the word {ANSWER_TEXT} can't be read in a tool; use another")
        self.tools = tools
        self._take_tools()

    def _take_tools(self) -> None:
        """Give the tools to the chat template; raises an error if the template can't take these."""
        without = self._render([STUB_QUESTION], prompt=True)
        self._tools = [_STUB_TOOL]
        if self._render([STUB_QUESTION], prompt=True) == without:
            raise NoToolsError("the model's chat template takes no tools")
        self._tools = json.loads(self.tools) if self.tools else None
        neutral = self._without_controls(self._tools)
        if neutral != self._tools:
            ids = self._render([STUB_QUESTION], prompt=True)
            given, self._tools = self._tools, neutral
            if self._has_made_controls(ids, [self._render([STUB_QUESTION], prompt=True)]):
                raise ModelError("a tool's description would become control tokens")
            self._tools = given

    @cached_property
    def note(self) -> str:
        """A line for the user if calls, as the template writes them, can't be found in replies."""
        marks, parser = self.marks, CallParser({SAMPLE_CALL["name"]}, 0)
        stream = self.reply_stream(in_history=marks.closing not in marks.call_sample)
        for text, part, _ in stream.push(marks.call_sample, is_end=True):
            if part != "thinking" and not (part == "call" and parser.hold_back(text)):
                parser.push(text)
        parser.finish(marks.call_lead)
        found = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in parser.calls]
        # A template that leaves calls out says nothing of their form.
        is_lost = ANSWER_TEXT in marks.call_sample and found != [SAMPLE_CALL]
        return _UNREADABLE_CALLS_NOTE if is_lost else ""

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The ids of the system prompt and the tools (None without both), and of the first turn."""
        if system or self._tools is None:
            return super().opening(content, system)
        _, turn = super().opening(content)
        start, end = turn.content
        block = TurnIds(turn.ids[:start], [Role.TEMPLATE] * start, (0, 0))
        return block, TurnIds(turn.ids[start:], turn.roles[start:], (0, end - start))

    def system_turn(self, content: str) -> TurnIds:
        """The ids of the tools and a system prompt, which may be "", at the start of a chat."""
        if self._tools is None or (content and not self._shows(content)):
            return super().system_turn(content)
        ids, *others = (self._head(text) for text in (content, *OTHER_TEXTS))
        if content:
            return self._with_round_end(self._find_content(ids, Role.SYSTEM, others, content))
        return self._with_round_end(TurnIds(ids, [Role.TEMPLATE] * len(ids), (0, 0)))

    def _head(self, system: str) -> list[int]:
        """The ids before the first user turn, without the token that starts a text."""
        first = self._first_turn_ids(system, QUESTION_TEXT, True)
        later = self._later_user(QUESTION_TEXT)
        head = first[: len(first) - prefix_length(first[::-1], later[::-1])]
        return head[1:] if head[:1] == [self._tokenizer.bos_token_id] else head

    def tool_results_turn(self, messages: Sequence[Message]) -> TurnIds:
        """The ids of one turn with all `messages`, which are tool results (role `tool`)."""
        others = [[{**message, "content": text} for message in messages] for text in OTHER_TEXTS]
        ids, *others_ids = [self._result_ids(each) for each in (messages, *others)]
        said = "\n".join(message["content"] for message in messages)
        return self._find_content(ids, Role.TOOL, others_ids, said)

    def tool_calls_turn(
        self, content: str, calls: Sequence[Message], header: list[int] | None = None
    ) -> TurnIds:
        """The ids of a given reply: the text `content`, then tool calls.

        If the template can't render the reply, it is written by `calls_as_text`. The unread ids of
        the reply's header come first; `header` is as in `TurnIds`.
        """
        calls = self._as_wanted(calls)
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        neutral = message | self._without_controls(message)
        ids: list[int] | None
        closing: list[int] | None = None
        try:
            ids, closing, _ = self._called(message)
            usual, *_ = self._called(neutral)
        except ModelError:  # such as several calls at once
            ids = None
        if ids is not None and self._has_made_controls(ids, [usual]):
            ids = None
        text = calls_as_text(content, [call["function"] for call in calls])
        return replace(self._after_header(ids, text, header), closing=closing)

    def call_form(self) -> tuple[str, str, str] | None:
        """The text before a call's JSON, the JSON's key for the arguments, and the text after it.

        None if the template does not write calls as JSON with a name and arguments.
        """
        call = _call("call00000", QUESTION_TEXT)
        try:
            ids, *_ = self._called({"role": "assistant", "content": "", "tool_calls": [call]})
            turn = self._after_header(ids, "", [])
            said = turn.ids[turn.content[0] :]
            text = self._tokenizer.decode(said, skip_special_tokens=True).strip()
            start = text.index("{")
            written, size = json.JSONDecoder().raw_decode(text[start:])
        except (ModelError, ValueError):
            return None
        for name in ("arguments", "parameters"):
            if written == {"name": QUESTION_TEXT, name: {QUESTION_TEXT: ANSWER_TEXT}}:
                return text[:start], name, text[start + size :]
        return None

    def _called(
        self, reply: Message, results: Sequence[Message] = ()
    ) -> tuple[list[int], list[int] | None, list[int]]:
        """The ids of a reply with calls, its closing (as in `TurnIds`), and of what follows."""
        results = results or [_result(call) for call in reply["tool_calls"]]
        chat = self._render([STUB_QUESTION, reply, *results], prompt=True)
        asked = self._render([STUB_QUESTION], prompt=True)
        start = len(asked) - len(self._prompt[0])
        asked, chat, closing = asked[:start], chat[start:], self._closing
        with suppress(ModelError):  # some templates refuse a question after a call
            ids = self._reply(reply)
            if ids and chat[: len(ids) + len(closing)] == [*ids, *closing]:
                return ids, None, chat[len(ids) + len(closing) :]
        alone = self._render([STUB_QUESTION, reply], prompt=False)
        end = prefix_length(alone, [*asked, *chat]) - start
        if end <= 0:
            raise ModelError("the model's chat template has no place for a call of a tool")
        if closing and chat[end - len(closing) : end] == closing:
            return chat[: end - len(closing)], None, chat[end:]
        return chat[:end], [], chat[end:]

    def _result_ids(self, messages: Sequence[Message]) -> list[int]:
        calls = [_call(each["tool_call_id"], each.get("name", QUESTION_TEXT)) for each in messages]
        reply = {"role": "assistant", "content": "", "tool_calls": self._as_wanted(calls)}
        try:
            return self._called(reply, messages)[-1]
        except ModelError:  # such as of several calls, which are read as text
            return self._after_reply(messages)

    def _as_wanted(self, calls: Sequence[Message]) -> list[Message]:
        found = list[Message]()
        for call in calls:
            function = call["function"]
            if self.marks.has_text_arguments and not isinstance(function["arguments"], str):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                function = function | {"arguments": text}
            found.append({**call, "function": function})
        return found

    def _after_reply(self, messages: Sequence[Message]) -> list[int]:
        ids = self._after_answer(self._render([*STUB_HISTORY, *messages], prompt=True))
        size = len(self._closing)
        if ids[:size] != self._closing:
            raise ModelError("the model's chat template has no place for what a tool returns")
        return ids[size:]

    def _without_controls(self, value: Any) -> Any:
        """Replace texts that have control tokens; raises ModelError if a key has one."""
        # The template gets keys as they are, without marks.
        if isinstance(value, dict):
            if any(self._has_control(name) for name in value):
                raise ModelError("a name in a tool or in its arguments has a control token")
            return {name: self._without_controls(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_controls(item) for item in value]
        return "a" if isinstance(value, str) and self._has_control(value) else value

    def _has_control(self, text: str) -> bool:
        return any(token in text for token in self.controls.values())


class PromptedTools(ToolTemplate):
    """For chat templates without tools: a text in the system prompt describes the tools.

    Calls are as in `calls_as_text`, and results are read as messages of the user.
    """

    def _take_tools(self) -> None:
        """The chat template has none."""

    @cached_property
    def note(self) -> str:
        return _PROMPTED_TOOLS_NOTE

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The ids of the system prompt and the tools (None without both), and of the first turn."""
        return super().opening(content, self._with_tools(system or "") or None)

    def system_turn(self, content: str) -> TurnIds:
        return super().system_turn(self._with_tools(content))

    def tool_results_turn(self, messages: Sequence[Message]) -> TurnIds:
        each = [f"<tool_response>\n{one['content']}\n</tool_response>" for one in messages]
        turn = super().user_turn("\n".join(each))
        return replace(
            turn, roles=[Role.TOOL if role is Role.USER else role for role in turn.roles]
        )

    def tool_calls_turn(
        self, content: str, calls: Sequence[Message], header: list[int] | None = None
    ) -> TurnIds:
        text = calls_as_text(content, [call["function"] for call in calls])
        return super().assistant_turn(text, header)

    def call_form(self) -> tuple[str, str, str]:
        return "<tool_call>\n", "arguments", "\n</tool_call>"

    def call_beginnings(self) -> list[str]:
        """How a call of each tool begins; first of `none`, which is not called."""
        found = list[str]()
        for tool in self._all_tools():
            function = tool["function"]
            schema = function["parameters"]
            given = "{"
            for name in schema.get("required", ())[:1]:  # the rest is easier then
                is_text = schema.get("properties", {}).get(name, {}).get("type") == "string"
                given += json.dumps(name) + (': "' if is_text else ":")
            called = f'{{"name": {json.dumps(function["name"])}, "arguments": {given}'
            found.append(f"<tool_call>\n{called}")
        return found

    def _all_tools(self) -> list[Message]:
        return [_NO_CALL_TOOL, *json.loads(self.tools)] if self.tools else []

    def _with_tools(self, system: str) -> str:
        if not self.tools:
            return system
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._all_tools())
        return "\n\n".join(filter(None, [system, _PROMPT.format(lines)]))


def _call(ident: str, name: str) -> Message:
    function = {"name": name, "arguments": {QUESTION_TEXT: ANSWER_TEXT}}
    return {"id": ident, "type": "function", "function": function}


def _result(call: Message) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": QUESTION_TEXT}
