"""Turns each new turn of a chat into token ids, by the model's chat template.

Only the new turn is rendered. A fixed short question and answer, the stubs, take the place of the
history: the list [stub question, stub answer, new turn] is rendered together, and the ids after the
stub answer are those that the model must read. If a template never changes what it wrote for
earlier turns, the joined ids of all turns equal those of the whole conversation rendered at once.

Text from the user never becomes a control token. A template is a program of the model's author and
is not trusted: see `template_limits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.text.anchors import Anchors, with_anchors
from sirchat.text.control_tokens import ControlTokens
from sirchat.text.template_limits import render

_PLAIN = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n"
    "{% elif message.role == 'user' %}USER: {{ message.content }}\n"
    "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""The template for models that have none: the format that the SirLLM paper uses with Vicuna."""

_BARE = "{{ messages[0].content }}"

# Only letters: tokenizers do not merge them with the control token, space or newline after them.
QUESTION = "qzv"
ANSWER = "zqxv"
OTHERS = ("a", "7 b")

Message = dict[str, Any]


@dataclass(frozen=True)
class TurnIds:
    """The token ids that the model reads for one turn.

    Attributes:
        ids: [n], the ids of the message's text, and those that the chat template adds around it.
        roles: [n], who wrote each id; `TEMPLATE` for ids that the chat template adds.
        content: start and end (exclusive) of the ids of the message's text.
    """

    ids: list[int]
    roles: list[Role]
    content: tuple[int, int]


class Template:
    """Turns messages into token ids, by the tokenizer's chat template, one turn at a time.

    If the tokenizer has no chat template, the format is `USER: ... ASSISTANT: ...`. If `anchors`
    has an added anchor token (the token that ends a sentence or round), this token is inserted
    where `anchors.per` says. Methods raise ModelError if the template can't render a turn.
    """

    _tools: Sequence[Message] | None = None

    def __init__(self, tokenizer: Any, anchors: Anchors | None = None) -> None:
        self._tokenizer = tokenizer
        self._anchors = anchors if anchors is not None and anchors.variant == "ac" else None
        self._template: str | None = None if tokenizer.chat_template else self._plain()
        self._control_tokens = ControlTokens(tokenizer)
        tokenizer.chat_control_tokens = self._control_tokens.texts  # also for transformers

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The token ids of the system prompt (None without one), and those of the first user turn.

        The ids of the system prompt include what the template writes around its text. This is so
        even if the template makes the prompt a part of the user turn. If the template allows no
        system message, the prompt is put before the user's text.
        """
        whole = self._first(system, content)
        turn = self._spans(whole, Role.USER, [self._first(system, other) for other in OTHERS])
        if not system:
            return None, self._anchored(turn, content)
        start, end = turn.content
        cut = self._system_length(system, whole) or start
        others = [self._first(other, QUESTION) for other in OTHERS]
        head = self._spans(self._first(system, QUESTION), Role.SYSTEM, others)
        rest = TurnIds(whole[cut:], turn.roles[cut:], (start - cut, end - cut))
        block = TurnIds(whole[:cut], head.roles[:cut], (0, cut))
        return self._closed(block), self._anchored(rest, content)

    def user(self, content: str) -> TurnIds:
        """The token ids of a user turn after the first, and of the header that begins the reply."""
        ids = self._render([*self._history, _message("user", content)], prompt=True)
        after = self._after_answer(ids)[len(self._closing) :]
        return self._anchored(self._spans(after, Role.USER, self._later_turns), content)

    def system(self, content: str) -> TurnIds:
        """The token ids of a system prompt that follows a reply.

        If the template can't render a system message after a reply, the ids are those of its text
        alone.
        """
        try:
            whole, *others = (self._later_system(text) for text in (content, *OTHERS))
        except ModelError:
            whole, others = [], [[]]
        turn = self._spans(whole, Role.SYSTEM, others)
        if turn.content[0] < turn.content[1]:
            return self._closed(turn)
        ids = self.as_text(content)
        return self._closed(TurnIds(ids, [Role.SYSTEM] * len(ids), (0, len(ids))))

    def assistant(self, content: str) -> TurnIds:
        """The token ids of the text of a given reply, for example from a transcript.

        The template's ids before and after the reply are not included.
        """
        ids = self._reply(_message("assistant", content))
        if ids is None or not self._added.isdisjoint(ids):  # text has become control tokens
            ids = self.as_text(content)
        return self._anchored(TurnIds(ids, [Role.ASSISTANT] * len(ids), (0, len(ids))), content)

    def _reply(self, message: Message) -> list[int] | None:
        """The token ids of a reply, without the template's ids before and after it.

        Returns None if the ids of the reply can't be separated from those of the template, for
        example because the template has another header for past replies.
        """
        question = [_message("user", QUESTION)]
        header = self._render(question, prompt=True)
        whole = self._render([*question, message, *question], prompt=True)
        tail = self._after_answer(self._render([*self._history, *question], prompt=True))
        end = len(whole) - len(tail)
        fits = whole[: len(header)] == header and whole[end:] == tail and end >= len(header)
        return whole[len(header) : end] if fits else None

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the template itself writes the `<think>` that begins a reply's reasoning."""
        if "<think>" not in str(self._tokenizer.chat_template or ""):
            return False
        header = self._render([_message("user", QUESTION)], prompt=True)
        return str(self._tokenizer.decode(header[-8:])).rstrip().endswith("<think>")

    @property
    def closing(self) -> list[int]:
        """The token ids to read after a reply: the chat template's, and then an anchor, if any."""
        return [*self._closing, *self._round_end]

    @cached_property
    def _closing(self) -> list[int]:
        """The token ids that the chat template puts after the text of a reply."""
        alone = self._after_answer(self._render(self._history, prompt=False))
        followed = [*self._history, _message("user", QUESTION)]
        return _common(alone, self._after_answer(self._render(followed, prompt=True)))

    def stop_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """The token ids that stop generation: `end_ids`, and control tokens that no reply contains.

        No reply contains the tokens that begin a turn: after one of these, the model would write
        the next speaker's text. Nor does a reply contain the tokens that this template never uses,
        such as padding. `declared` are the stop ids in the model's own generation settings.
        """
        return self.end_ids(declared) | frozenset(self._openers | self._foreign)

    def end_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """The token ids by which the model ends its reply.

        These are `declared`, the stop ids in the model's own generation settings; the tokenizer's
        end of sequence; and the first id that the template puts after a reply, if this is an added
        token.
        """
        ids = set(declared if isinstance(declared, list) else [declared])
        ids |= {self._tokenizer.eos_token_id}
        ids |= set(self._closing[:1]) & set(self._tokenizer.added_tokens_decoder)
        return frozenset(int(i) for i in ids if i is not None)

    @property
    def _openers(self) -> set[int]:
        """The token ids of control tokens with which the template begins a turn.

        Of the control tokens before the text of a user or system turn, only the first is included,
        because the others may also occur in replies. All control tokens between a user's text and
        the reply are included.
        """
        control = self._control
        user, system = self.user(QUESTION), self.system(QUESTION)
        headers = [turn.ids[: turn.content[0]] for turn in (user, system)]
        found = {next((i for i in header if i in control), None) for header in headers}
        found |= control.intersection(user.ids[user.content[1] :])  # the reply's own header
        return {i for i in found if i is not None} - {self._anchor}

    @property
    def _foreign(self) -> set[int]:
        """The ids of control tokens that the template never uses, or only at the chat's start."""
        stub = [_message("user", QUESTION), _message("assistant", ANSWER)]
        own = {*self._render(stub, prompt=False), *self._render(stub[:1], prompt=True)}
        source = str(self._tokenizer.chat_template or "")  # may name tokens for reasoning or tools
        known = self._tokenizer.added_tokens_decoder
        own |= {i for i in self._control if known[i].content in source}
        return self._control - (own - {self._tokenizer.bos_token_id}) - {self._anchor}

    @cached_property
    def _control(self) -> set[int]:
        known = self._tokenizer.added_tokens_decoder
        return {i for i, token in known.items() if token.special}

    @cached_property
    def _added(self) -> set[int]:
        """The token ids of all added tokens, except those that consist of blanks."""
        known = self._tokenizer.added_tokens_decoder
        return {i for i, token in known.items() if not token.content.isspace()}

    @property
    def _anchor(self) -> int | None:
        return None if self._anchors is None else self._anchors.token_id

    @property
    def _round_end(self) -> list[int]:
        """A list with the anchor's id if `anchors.per` is `round`; otherwise an empty list.

        With `round`, an anchor ends each reply and each system prompt.
        """
        anchors = self._anchors
        if anchors is None or anchors.token_id is None or anchors.per != "round":
            return []
        return [anchors.token_id]

    def _closed(self, turn: TurnIds) -> TurnIds:
        """Return a system prompt's `turn`, with an anchor at its end if rounds end with anchors."""
        anchor = self._round_end
        return TurnIds(
            [*turn.ids, *anchor], [*turn.roles, *[Role.TEMPLATE] * len(anchor)], turn.content
        )

    def _anchored(self, turn: TurnIds, content: str) -> TurnIds:
        """Return `turn` with anchors inserted into its text `content`, where the settings say."""
        anchors, (start, end) = self._anchors, turn.content
        if anchors is None or anchors.per == "round" or start == end:
            return turn
        ids = with_anchors(content, anchors, self.as_text)
        roles = [Role.TEMPLATE if i == anchors.token_id else turn.roles[start] for i in ids]
        return TurnIds(
            [*turn.ids[:start], *ids, *turn.ids[end:]],
            [*turn.roles[:start], *roles, *turn.roles[end:]],
            (start, start + len(ids)),
        )

    @property
    def _history(self) -> list[Message]:
        return [_message("user", QUESTION), _message("assistant", ANSWER)]

    def _plain(self) -> str:
        """The template `_PLAIN` without the special tokens that the tokenizer does not have."""
        template = _PLAIN
        for name in ("bos_token", "eos_token"):
            if getattr(self._tokenizer, name) is None:
                template = template.replace("{{ " + name + " }}", "")
        return template

    def _render(
        self, messages: Sequence[Message], *, prompt: bool, template: str | None = None
    ) -> list[int]:
        texts = [value for one in messages for name, value in one.items() if name != "role"]
        size = sum(len(str(one)) for one in (*texts, *(self._tools or ())))
        try:
            source = template or self._template or self._tokenizer.get_chat_template()
            text = render(
                source,
                size,
                messages=self._marked(messages),
                add_generation_prompt=prompt,
                tools=self._marked(self._tools),
                tools_in_user_message=False,  # of Llama: they are pinned with the system prompt
                documents=None,
                **self._tokenizer.special_tokens_map,
            )
            return self._control_tokens.ids(text)
        except TemplateError as error:
            problem = _brief(error)
            raise ModelError(f"the model's chat template refuses this turn: {problem}") from error
        except ValueError as error:
            raise ModelError(f"this text cannot be read as plain text: {_brief(error)}") from error
        except Exception as error:  # a template is a program, and may fail in any way
            problem = f"{type(error).__name__}: {_brief(error)}"
            raise ModelError(f"the model's chat template fails: {problem}") from error

    def _marked(self, value: Any) -> Any:
        """A copy of messages or tools, with marks around the control tokens in their texts.

        The marks keep a text from becoming a control token.
        """
        if isinstance(value, str):
            return self._control_tokens.marked(value)
        if isinstance(value, dict):
            return {name: self._marked(one) for name, one in value.items()}
        return [self._marked(one) for one in value] if isinstance(value, list | tuple) else value

    def as_text(self, text: str) -> list[int]:
        """The token ids of `text` alone, without anything from the chat template."""
        return self._render([_message("assistant", text)], prompt=False, template=_BARE)

    def _after_answer(self, ids: list[int]) -> list[int]:
        """The part of `ids`, a rendered conversation, that follows the stub answer `ANSWER`."""
        marker = self._answer_ids
        for start in range(len(ids) - len(marker) + 1):  # the first match: the stub precedes all
            if ids[start : start + len(marker)] == marker:
                return ids[start + len(marker) :]
        raise ModelError("the chat template has no recognizable end of a reply")

    @cached_property
    def _answer_ids(self) -> list[int]:
        """The ids of `ANSWER` (the stub answer that ends the stub history) in a rendered chat."""
        question = [_message("user", QUESTION)]
        ids = self._render([*question, _message("assistant", ANSWER)], prompt=False)
        other = self._render([*question, _message("assistant", ANSWER + " a")], prompt=False)
        start = len(_common(self._render(question, prompt=False), ids))
        end = len(_common(ids, other))
        found = ids[start:end]
        text = self._tokenizer.decode(found)
        while found[1:] and ANSWER in self._tokenizer.decode(found[1:]):
            found = found[1:]
        if ANSWER not in text:
            raise ModelError("the chat template does not show the reply's text")
        return found

    def _spans(self, ids: list[int], role: Role, others: Sequence[list[int]]) -> TurnIds:
        """Find which `ids` of a turn are the text's, and which are the template's.

        `others` has the ids of the same turn with other texts, which contain no control tokens. Ids
        at the beginning and at the end that are the same in `ids` and in all of `others` are the
        template's. `role` is the role of the text's ids. Raises ModelError if a part of the text
        has become a control token.
        """
        usual = Counter[int]()
        for other in others:
            usual |= Counter(i for i in other if i in self._added)
        if Counter(i for i in ids if i in self._added) - usual:
            raise ModelError("the model's chat template turns this text into control tokens")
        start = min(len(_common(ids, other)) for other in others)
        tail = min(len(_common(ids[::-1], other[::-1])) for other in others)
        end = max(start, len(ids) - tail)
        roles = [role if start <= i < end else Role.TEMPLATE for i in range(len(ids))]
        return TurnIds(ids, roles, (start, end))

    def _first(self, system: str | None, content: str) -> list[int]:
        """The token ids of the system prompt, if there is one, and of the first user turn."""
        if system and not self._allows_system:
            return self._render([_message("user", f"{system}\n\n{content}")], prompt=True)
        before = [_message("system", system)] if system else []
        return self._render([*before, _message("user", content)], prompt=True)

    @cached_property
    def _allows_system(self) -> bool:
        """Whether the chat template allows a system message."""
        try:
            stub = [_message("system", QUESTION), _message("user", QUESTION)]
            self._render(stub, prompt=True)
        except ModelError:
            return False
        return True

    @cached_property
    def _later_turns(self) -> list[list[int]]:
        """For each stub text in `OTHERS`, the ids of a user turn (not the first) with this text."""
        stub = self._history
        rendered = [self._render([*stub, _message("user", text)], prompt=True) for text in OTHERS]
        return [self._after_answer(ids)[len(self._closing) :] for ids in rendered]

    def _later_system(self, content: str) -> list[int]:
        """The token ids that a system message adds after a reply.

        The list is empty if the template puts the system message at another place.
        """
        ids = self._render([*self._history, _message("system", content)], prompt=False)
        after, closing = self._after_answer(ids), self._closing
        return after[len(closing) :] if after[: len(closing)] == closing else []

    def _system_length(self, system: str, whole: list[int]) -> int:
        """Number of ids at the start of `whole` that belong to the system message `system`.

        Returns 0 if the template makes the system message a part of the user turn.
        """
        try:
            block = self._render([_message("system", system)], prompt=False)
            other = self._render([_message("system", QUESTION)], prompt=False)
        except ModelError:
            return 0
        return len(block) if block != other and whole[: len(block)] == block else 0


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _common(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The longest list of ids with which both `left` and `right` begin."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return list(left[:count])


def _brief(error: Exception) -> str:
    """The first 200 characters of an error's message, without control characters."""
    return "".join(one if one.isprintable() else " " for one in str(error)[:200])
