"""Templates for other uses than a plain chat: chats with tools, and texts without a chat."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.text.anchors import Anchors
from sirchat.text.template import ANSWER, OTHERS, QUESTION, Message, Template, TurnIds

_STUB: Message = {
    "type": "function",
    "function": {
        "name": QUESTION,
        "description": QUESTION,
        "parameters": {"type": "object", "properties": {}},
    },
}
_NEUTRAL = "a"


class ToolTemplate(Template):
    """Turns messages into token ids, for a chat in which the model may call tools.

    Raises ModelError if the model's chat template takes no tools.

    Attributes:
        tools: the descriptions of the tools, as JSON; "" if there are none.
        following: ids of the next turn, made by `results` or `calls`. If these are set, `user` or
            `assistant` returns them instead of the ids of a text.
    """

    def __init__(self, tokenizer: Any, anchors: Anchors | None, tools: str = "") -> None:
        super().__init__(tokenizer, anchors)
        if ANSWER in tools:  # it would be taken for the reply that stands for the history
            raise ModelError(f"the word {ANSWER} can't be read in a tool; use another")
        self.tools = tools
        self.following: TurnIds | None = None
        question = [{"role": "user", "content": QUESTION}]
        without = self._render(question, prompt=True)
        self._tools = [_STUB]
        if self._render(question, prompt=True) == without:
            raise ModelError("the model's chat template takes no tools")
        self._tools = json.loads(tools) if tools else None
        neutral = self._neutral(self._tools)
        if neutral != self._tools:
            found = Counter(self._control_ids(self._render(question, prompt=True)))
            given, self._tools = self._tools, neutral
            if found - Counter(self._control_ids(self._render(question, prompt=True))):
                raise ModelError("a tool's description would become control tokens")
            self._tools = given

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The token ids of the system prompt with the tools, and those of the first user turn.

        The former are None if there are neither a system prompt nor tools.
        """
        if system or self._tools is None:
            return super().opening(content, system)
        _, turn = super().opening(content)
        (start, end), whole = turn.content, turn.ids
        block = TurnIds(whole[:start], [Role.TEMPLATE] * start, (0, 0))
        return block, TurnIds(whole[start:], turn.roles[start:], (0, end - start))

    def user(self, content: str) -> TurnIds:
        """The token ids of a user turn after the first.

        If `following` is set, its value is returned instead, and `following` is set to None.
        """
        turn, self.following = self.following, None
        return super().user(content) if turn is None else turn

    def assistant(self, content: str) -> TurnIds:
        """The token ids of the text of a reply.

        If `following` is set, its value is returned instead, and `following` is set to None.
        """
        turn, self.following = self.following, None
        return super().assistant(content) if turn is None else turn

    def results(self, messages: Sequence[Message]) -> TurnIds:
        """The token ids of one turn with all `messages`: results of tools, with the role `tool`."""
        whole, *others = (
            self._after_reply([one | {"content": text or one["content"]} for one in messages])
            for text in ("", *OTHERS)
        )
        return self._spans(whole, Role.USER, others)

    def _after_reply(self, messages: Sequence[Message]) -> list[int]:
        ids = self._after_answer(self._render([*self._history, *messages], prompt=True))
        size = len(self._closing)
        if ids[:size] != self._closing:
            raise ModelError("the model's chat template has no place for what a tool returns")
        return ids[size:]

    def calls(self, content: str, calls: Sequence[Message]) -> TurnIds:
        """The token ids of a given reply, which has the text `content` and then calls tools.

        If the template can't render the reply, the ids are those of the text that `calls_as_text`
        makes of the calls.
        """
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        neutral, usual = message | self._neutral(message), None
        try:
            ids = self._reply(message)
            usual = self._reply(neutral)
        except ModelError:  # such as several calls at once
            ids = None
        if ids is None or Counter(self._control_ids(ids)) - Counter(self._control_ids(usual or [])):
            functions = [one["function"] for one in calls]
            ids = self.as_text(calls_as_text(content, functions))
        return TurnIds(ids, [Role.ASSISTANT] * len(ids), (0, len(ids)))

    def call_form(self) -> tuple[str, str, str] | None:
        """How the template writes a tool call; None if not as JSON with a name and arguments.

        Returns the text before the JSON, the JSON's key for the arguments (`arguments` or
        `parameters`), and the text after the JSON.
        """
        function = {"name": QUESTION, "arguments": {QUESTION: ANSWER}}
        call = {"id": "call00000", "type": "function", "function": function}
        try:
            ids = self._reply({"role": "assistant", "content": "", "tool_calls": [call]})
            text = self._tokenizer.decode(ids or [], skip_special_tokens=True).strip()
            start = text.index("{")
            written, size = json.JSONDecoder().raw_decode(text[start:])
        except (ModelError, ValueError):
            return None
        for name in ("arguments", "parameters"):
            if written == {"name": QUESTION, name: {QUESTION: ANSWER}}:
                return text[:start], name, text[start + size :]
        return None

    def _control_ids(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self._added]

    def _neutral(self, value: Any) -> Any:
        """A copy of `value` in which each text with a control token is replaced by `_NEUTRAL`.

        Raises ModelError if a key of an object has a control token, because the template gets keys
        as they are, without marks.
        """
        if isinstance(value, dict):
            if any(self._has_control(name) for name in value):
                raise ModelError("a name in a tool or in its arguments has a control token")
            return {name: self._neutral(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._neutral(one) for one in value]
        return _NEUTRAL if isinstance(value, str) and self._has_control(value) else value

    def _has_control(self, text: str) -> bool:
        known = self._tokenizer.added_tokens_decoder
        return any(known[i].content in text for i in self._added)


def calls_as_text(content: str, functions: Sequence[Message]) -> str:
    """The text `content`, then the calls of `functions` in the format of Hermes and Qwen."""
    written = [
        f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in functions
    ]
    return "\n".join([content, *written] if content else written)


class PlainText(Template):
    """Turns one text into token ids without a chat template, so that a model continues the text."""

    def opening(self, content: str, system: str | None = None) -> tuple[None, TurnIds]:
        """Return None (there is no system prompt) and the token ids of the text `content`.

        If the tokenizer has a beginning-of-sequence token, the ids begin with this token.
        """
        begin = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        ids = self.as_text(content)
        roles = [*[Role.TEMPLATE] * len(begin), *[Role.USER] * len(ids)]
        return None, TurnIds([*begin, *ids], roles, (len(begin), len(roles)))

    @property
    def closing(self) -> list[int]:
        """An empty list: without a chat template, no ids follow the generated text."""
        return []
