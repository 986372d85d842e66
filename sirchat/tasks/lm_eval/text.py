"""Text to ids as lm-eval's own adapter for Hugging Face models does it, so that figures compare.

Two things differ, as everywhere here. Text never becomes a control token: what a document happens
to spell is read as plain text or, in a chat template, which needs its own, left out. And no text
begins with two begin tokens.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2.exceptions import TemplateError

from sirchat.errors import ModelError, UsageError, shown
from sirchat.text.anchors import Anchors
from sirchat.text.template import Template

_BARE = "{{ messages[0].content }}"

_BEHIND_BLANK_LINE = re.compile(r"(?<=\n\n)(?!\n)")

Ids = list[int]


class TextEncoder:
    """Encodes contexts and continuations; `chat`, where contexts come out of the chat template.

    In contexts a token of the model's own, if `anchors` say so, stands behind each example: behind
    a blank line, which is what lm-eval puts between two; in a chat, behind replies and the system
    prompt.

    Attributes:
        prefix: the id that stands where there is no context.

    Raises ModelError for a tokenizer that has no such token, or no template where it must.
    """

    def __init__(
        self, tokenizer: Any, *, chat: bool = False, anchors: Anchors | None = None
    ) -> None:
        if chat and not tokenizer.chat_template:
            raise ModelError("the model has no chat template", hint="run without one")
        prefix = tokenizer.bos_token_id
        prefix = tokenizer.eos_token_id if prefix is None else prefix
        if prefix is None:
            raise ModelError("the tokenizer has no token that begins or ends a text")
        self.prefix = int(prefix)
        self._tokenizer, self._chat = tokenizer, chat
        self._anchor = anchors.token_id if anchors is not None else None
        Template(tokenizer)  # marks the control tokens
        control = map(re.escape, tokenizer.chat_control_tokens)
        self._control = re.compile("|".join(sorted(control, key=len, reverse=True)) or r"(?!)")

    def encode(self, text: str, *, special: bool = True) -> Ids:
        """The ids of a text; `special` begins it as the tokenizer does, unless it is begun."""
        if self._chat:
            begun = text.startswith(self._tokenizer.decode([self.prefix]))
            return self._encode(text, special and not begun)
        if self._control.search(text):
            return [*self._encode("", special), *self._spelled(text)]
        return self._encode(text, special)

    def context(self, text: str) -> Ids:
        """The ids of a context, with the model's own anchors."""
        if self._anchor is None or self._chat:
            return self.encode(text)
        first, *others = _BEHIND_BLANK_LINE.split(text)
        ids = self.encode(first)
        for one in others:
            ids += [self._anchor, *self.encode(one, special=False)]
        return ids

    def pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """The ids of a context and of what follows it; neither is empty.

        Both are encoded as one text, which is cut where the context ends; blanks at the context's
        end belong to what follows. Raises UsageError when nothing is left to follow.
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
                f"continuation {shown(continuation)} has no token of its own behind its context"
            )
        return head or [self.prefix], tail

    def conversation(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        """What the chat template makes of a conversation: a text to `encode`.

        `prompt` opens a reply; else the last message stays open. Where the template knows no
        system message, it is left out.
        """
        clean = [{**one, "content": self._plain(one["content"])} for one in messages]
        try:
            return self._rendered(clean, prompt)
        except TemplateError:
            return self._rendered([one for one in clean if one["role"] != "system"], prompt)

    def _encode(self, text: str, special: bool) -> Ids:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _spelled(self, text: str) -> Ids:
        """The ids of a text, control tokens letter by letter."""
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            chat_template=_BARE,
            sanitize_control_tokens=True,
            tokenize=True,
            return_dict=False,
        )
        return list(ids)

    def _plain(self, text: str) -> str:
        """A text without control tokens; leaving one out may spell another."""
        while (left := self._control.sub("", text)) != text:
            text = left
        return text

    def _rendered(self, messages: list[dict[str, str]], prompt: bool) -> str:
        end = {"add_generation_prompt": prompt, "continue_final_message": not prompt}
        text = self._shown(messages, **end)
        if self._anchor is None:
            return text
        for count in range(len(messages) - 1, 0, -1):
            before = "" if messages[count - 1]["role"] == "user" else self._start(messages[:count])
            if before and text.startswith(before):
                text = before + self._tokenizer.decode([self._anchor]) + text[len(before) :]
        return text

    def _start(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation's start; none where the template has none for so little."""
        try:
            return self._shown(messages)
        except TemplateError:
            return ""

    def _shown(self, messages: list[dict[str, str]], **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
