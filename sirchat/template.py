"""The chat template, one turn at a time: text in, ids out; text never becomes a control token.

Only the new turn is rendered. A stub question with a stub answer stands for the history: the list
[stub question, stub answer, new turn] is rendered as one, and what follows the stub answer is what
the model must read. For templates that only append, the ids of all turns, one after another, equal
the ids of the whole conversation rendered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from sirchat.errors import ModelError
from sirchat.memory.ledger import Role

_PLAIN = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n"
    "{% elif message.role == 'user' %}USER: {{ message.content }}\n"
    "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""For models without a template: the format that the SirLLM paper uses with Vicuna."""

# Letters alone: tokenizers do not merge them with the control token, space or newline after them.
_QUESTION = "qzv"
_ANSWER = "zqxv"
_OTHERS = ("a", "7 b")

Message = dict[str, str]


@dataclass(frozen=True)
class TurnIds:
    """What the model reads for one turn: ids [n] and each one's role; `content` is their span."""

    ids: list[int]
    roles: list[Role]
    content: tuple[int, int]


class Template:
    """Renders turns for one tokenizer.

    The tokenizer's own chat template is used, or a plain USER / ASSISTANT one when it has none.
    Raises ModelError when the template can't be rendered turn by turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template: str | None = None if tokenizer.chat_template else self._plain()
        # Every added token is a control token here, but for runs of blanks, which are plain text.
        tokenizer.chat_control_tokens = [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if not token.content.isspace()
        ]

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The first turn: the system prompt's ids, if there are any, and the user turn's.

        Templates that write a default system prompt, or fold it into the user turn, give its ids
        as the system's; a template that knows no system prompt gets it before the user's text.
        """
        before = [_message("system", system)] if system else []
        try:
            whole = self._render([*before, _message("user", content)], prompt=True)
        except TemplateError:
            if not system:
                raise
            joined = self._render([_message("user", f"{system}\n\n{content}")], prompt=True)
            return None, self._spans(joined, Role.USER, self._openings([]))
        turn = self._spans(whole, Role.USER, self._openings(before))
        if not system:
            return None, turn
        cut = self._system_length(before, whole, turn.content[0])
        roles = self._system_roles(before, whole[:cut], system)
        start, end = turn.content
        rest = TurnIds(whole[cut:], turn.roles[cut:], (start - cut, end - cut))
        return TurnIds(whole[:cut], roles, (0, cut)), rest

    def user(self, content: str) -> TurnIds:
        """A later user turn, up to and with the header of the reply."""
        ids = self._render([*self._history, _message("user", content)], prompt=True)
        after = self._after_answer(ids)[len(self.closing) :]
        return self._spans(after, Role.USER, self._later_turns)

    def assistant(self, content: str) -> TurnIds:
        """A reply that is read, not generated: its text alone, between header and closing ids."""
        question = [_message("user", _QUESTION)]
        header = self._render(question, prompt=True)
        following = [_message("user", _QUESTION)]
        whole = self._render([*question, _message("assistant", content), *following], prompt=True)
        tail = self._after_answer(self._render([*self._history, *following], prompt=True))
        end = len(whole) - len(tail)
        if whole[: len(header)] == header and whole[end:] == tail and end >= len(header):
            ids = whole[len(header) : end]
        else:  # the template rewrites past replies, dropping reasoning, say: read the text as is
            ids = self._as_text(content)
        return TurnIds(ids, [Role.ASSISTANT] * len(ids), (0, len(ids)))

    @cached_property
    def closing(self) -> list[int]:
        """The ids that end a reply."""
        alone = self._after_answer(self._render(self._history, prompt=False))
        followed = [*self._history, _message("user", _QUESTION)]
        return _common(alone, self._after_answer(self._render(followed, prompt=True)))

    def stop_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """Ids that end generation: the declared ones, the tokenizer's, and the closing's first."""
        ids = set(declared if isinstance(declared, list) else [declared])
        ids |= {self._tokenizer.eos_token_id}
        added = set(self._tokenizer.added_tokens_decoder)
        ids |= set(self.closing[:1]) & added
        return frozenset(int(i) for i in ids if i is not None)

    @property
    def _history(self) -> list[Message]:
        return [_message("user", _QUESTION), _message("assistant", _ANSWER)]

    def _plain(self) -> str:
        """The plain template, without the special tokens that the tokenizer does not have."""
        template = _PLAIN
        for name in ("bos_token", "eos_token"):
            if getattr(self._tokenizer, name) is None:
                template = template.replace("{{ " + name + " }}", "")
        return template

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                add_generation_prompt=prompt,
                sanitize_control_tokens=True,
                tokenize=True,
                return_dict=False,
            )
        except ValueError as error:
            raise ModelError(f"this text cannot be read as plain text: {error}") from error
        return [int(i) for i in ids]

    def _as_text(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [int(i) for i in ids]

    def _after_answer(self, ids: list[int]) -> list[int]:
        """What follows the stub answer."""
        marker = self._answer_ids
        for start in range(len(ids) - len(marker), -1, -1):
            if ids[start : start + len(marker)] == marker:
                return ids[start + len(marker) :]
        raise ModelError("the chat template cannot be cut after a reply")

    @cached_property
    def _answer_ids(self) -> list[int]:
        """The last ids of the stub answer, as they come out inside the template."""
        question = [_message("user", _QUESTION)]
        ids = self._render([*question, _message("assistant", _ANSWER)], prompt=False)
        other = self._render([*question, _message("assistant", _ANSWER + " a")], prompt=False)
        start = len(_common(self._render(question, prompt=False), ids))
        end = len(_common(ids, other))
        found = ids[start:end]
        text = self._tokenizer.decode(found)
        while found[1:] and _ANSWER in self._tokenizer.decode(found[1:]):
            found = found[1:]
        if _ANSWER not in text:
            raise ModelError("the chat template does not show the reply's text")
        return found

    def _spans(self, ids: list[int], role: Role, others: Sequence[list[int]]) -> TurnIds:
        """Tell text from template: what stays the same under other texts is the template's."""
        start = min(len(_common(ids, other)) for other in others)
        tail = min(len(_common(ids[::-1], other[::-1])) for other in others)
        end = max(start, len(ids) - tail)
        roles = [role if start <= i < end else Role.TEMPLATE for i in range(len(ids))]
        return TurnIds(ids, roles, (start, end))

    def _openings(self, before: list[Message]) -> list[list[int]]:
        """Opening turns with other texts."""
        return [self._render([*before, _message("user", o)], prompt=True) for o in _OTHERS]

    @cached_property
    def _later_turns(self) -> list[list[int]]:
        """Later user turns with other texts."""
        stub = self._history
        rendered = [self._render([*stub, _message("user", o)], prompt=True) for o in _OTHERS]
        return [self._after_answer(ids)[len(self.closing) :] for ids in rendered]

    def _system_length(self, before: list[Message], whole: list[int], content_start: int) -> int:
        """Ids that belong to the system prompt: its own block, or all before the user's text."""
        try:
            block = self._render(before, prompt=False)
            shows_text = block != self._render([_message("system", _QUESTION)], prompt=False)
        except TemplateError:
            return content_start
        return len(block) if shows_text and whole[: len(block)] == block else content_start

    def _system_roles(self, before: list[Message], ids: list[int], content: str) -> list[Role]:
        """Template or system text, by comparing with another system prompt."""
        other = _OTHERS[0] if content != _OTHERS[0] else _OTHERS[1]
        stub = [_message("system", other), _message("user", _QUESTION)]
        rendered = self._render(stub, prompt=False)
        whole = self._render([*before, _message("user", _QUESTION)], prompt=False)
        start = len(_common(whole, rendered))
        end = len(whole) - len(_common(whole[::-1], rendered[::-1]))
        return [Role.SYSTEM if start <= i < end else Role.TEMPLATE for i in range(len(ids))]


def _message(role: str, content: str | None) -> Message:
    return {"role": role, "content": content or ""}


def _common(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The longest common prefix."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return list(left[:count])
