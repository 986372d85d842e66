"""Encodes text as lm-eval's adapter for Hugging Face models does, so that results are comparable.

Two things differ from that adapter.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2.exceptions import TemplateError

from sirchat.errors import ModelError, UsageError, format_value
from sirchat.text.anchors import Anchors
from sirchat.text.template import Template

_CONTENT_ONLY = "{{ messages[0].content }}"

_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)(?!\n)")

Ids = list[int]


class TextEncoder:
    """Encodes contexts, and the continuations of contexts, as token ids.

    `chat` says whether contexts were rendered by the chat template. Raises ModelError if the
    tokenizer has neither BOS nor EOS, or if `chat` is true and the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, chat: bool = False, anchors: Anchors | None = None
    ) -> None:
        if chat and not tokenizer.chat_template:
            raise ModelError(
                "the model has no chat template", hint="leave out --apply-chat-template"
            )
        prefix = tokenizer.bos_token_id
        prefix = tokenizer.eos_token_id if prefix is None else prefix
        if prefix is None:
            raise ModelError("the tokenizer has no token that begins or ends a text")
        self.prefix = int(prefix)
        self._tokenizer, self._chat = tokenizer, chat
        self._anchor = anchors.token_id if anchors is not None else None
        Template(tokenizer)  # sets `chat_control_tokens`
        control = map(re.escape, tokenizer.chat_control_tokens)
        self._control = re.compile("|".join(sorted(control, key=len, reverse=True)) or r"(?!)")

    def encode(self, text: str, *, special: bool = True) -> Ids:
        """The token ids of a text."""
        if self._chat:
            has_prefix = text.startswith(self._tokenizer.decode([self.prefix]))
            return self._encode(text, special and not has_prefix)
        if self._control.search(text):
            return [*self._encode("", special), *self._encode_as_plain_text(text)]
        return self._encode(text, special)

    def context(self, text: str) -> Ids:
        """The token ids of a context.

        If the model has anchors, there is an anchor token after each few-shot example.
        """
        if self._anchor is None or self._chat:
            return self.encode(text)
        first, *others = _AFTER_BLANK_LINE.split(text)
        ids = self.encode(first)
        for one in others:
            ids += [self._anchor, *self.encode(one, special=False)]
        return ids

    def pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """The token ids of a context and those of its continuation; neither list is empty.

        Raises UsageError for a continuation without ids.
        """
        end = len(context.rstrip())
        text = context[end:] + (self._plain(continuation) if self._chat else continuation)
        if end:
            head = self.context(context[:end])
            tail = self.encode(context[:end] + text)[len(self.encode(context[:end])) :]
        else:
            head, tail = [self.prefix], self.encode(text, special=False)
        if not tail:
            raise UsageError(
                f"continuation {format_value(continuation)} adds no token of its own to its context"
            )
        return head or [self.prefix], tail

    def conversation(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        """A conversation as text, rendered by the chat template; `encode` makes ids of the text."""
        clean = [{**one, "content": self._plain(one["content"])} for one in messages]
        try:
            return self._render_with_anchors(clean, prompt)
        except TemplateError:
            return self._render_with_anchors(
                [one for one in clean if one["role"] != "system"], prompt
            )

    def _encode(self, text: str, special: bool) -> Ids:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _encode_as_plain_text(self, text: str) -> Ids:
        """The token ids of a text; the text of a control token is encoded like any other text."""
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            chat_template=_CONTENT_ONLY,
            sanitize_control_tokens=True,
            tokenize=True,
            return_dict=False,
        )
        return list(ids)

    def _plain(self, text: str) -> str:
        """A copy of a text without the texts of control tokens, such as `<|im_end|>`."""
        while (left := self._control.sub("", text)) != text:
            text = left
        return text

    def _render_with_anchors(self, messages: list[dict[str, str]], prompt: bool) -> str:
        end = {"add_generation_prompt": prompt, "continue_final_message": not prompt}
        text = self._render(messages, **end)
        if self._anchor is None:
            return text
        for count in range(len(messages) - 1, 0, -1):
            before = "" if messages[count - 1]["role"] == "user" else self._start(messages[:count])
            if before and text.startswith(before):
                text = before + self._tokenizer.decode([self._anchor]) + text[len(before) :]
        return text

    def _start(self, messages: list[dict[str, str]]) -> str:
        """Some messages as text, rendered by the chat template; '' if the template refuses them."""
        try:
            return self._render(messages)
        except TemplateError:
            return ""

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
