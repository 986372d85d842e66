"""Turns each new turn of a chat into token ids, by the model's chat template.

Only the new turn is rendered, after a stub question and answer in place of the history; the ids
after the stub answer are those to read. Text from the user never becomes a control token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.text.anchors import Anchors, with_anchors
from sirchat.text.control_tokens import ControlTokens
from sirchat.text.template_sandbox import render

# For models that have none: the format that the SirLLM paper uses with Vicuna.
_PLAIN = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n"
    "{% elif message.role == 'user' %}USER: {{ message.content }}\n"
    "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

# Only letters: tokenizers do not merge them with the control token, space or newline after them.
QUESTION = "qzv"
ANSWER = "zqxv"
OTHERS = ("a", "7 b")

Message = dict[str, Any]

STUB_QUESTION: Message = {"role": "user", "content": QUESTION}
STUB_HISTORY: list[Message] = [STUB_QUESTION, {"role": "assistant", "content": ANSWER}]


@dataclass(frozen=True)
class TurnIds:
    """The token ids that the model reads for one turn."""

    ids: list[int]  # [n], of the message's text, and what the template adds around it
    roles: list[Role]  # [n], who wrote each id; `TEMPLATE` for those that the template adds
    content: tuple[int, int]  # start and end (exclusive) of the ids of the message's text


class Template:
    """Turns messages into token ids, one turn at a time.

    Without a chat template the format is `USER: ... ASSISTANT: ...`. An added anchor token is
    inserted where `anchors.per` says. `ends` are the ids by which the model's settings end a reply.
    Methods raise ModelError if the template can't render a turn.
    """

    _tools: Sequence[Message] | None = None

    def __init__(
        self,
        tokenizer: Any,
        anchors: Anchors | None = None,
        ends: int | Iterable[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._anchors = anchors if anchors is not None and anchors.variant == "ac" else None
        self._template: str | None = None if tokenizer.chat_template else self._plain_template()
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._control_tokens = ControlTokens(tokenizer)
        self._control_tokens = ControlTokens(tokenizer, self._written_texts(), self.ends)
        tokenizer.chat_control_tokens = self._control_tokens.texts  # also for transformers

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The ids of the system prompt (None without one), and those of the first user turn.

        A template that makes the prompt a part of the user's turn is cut in two; if it allows no
        system message, the prompt is put before the user's text.
        """
        ids = self._first_turn_ids(system, content)
        others = [self._first_turn_ids(system, other) for other in OTHERS]
        turn = self._find_content(ids, Role.USER, others, content)
        if not system:
            return None, self._anchored(turn, content)
        start, end = turn.content
        cut = self._system_length(system, turn.ids) or start
        ids = self._first_turn_ids(system, QUESTION)
        others = [self._first_turn_ids(other, QUESTION) for other in OTHERS]
        if self._has_made_controls(ids, others):
            return self._opening_of_plain(content, system)
        head = self._find_content(ids, Role.SYSTEM, others, system)
        rest = TurnIds(turn.ids[cut:], turn.roles[cut:], (start - cut, end - cut))
        block = TurnIds(turn.ids[:cut], head.roles[:cut], (0, cut))
        return self._with_round_end(block), self._anchored(rest, content)

    def user(self, content: str) -> TurnIds:
        """The ids of a user turn after the first, and of the header that begins the reply."""
        ids = self._later_user(content)
        turn = self._find_content(ids, Role.USER, self._later_turns, content)
        return self._anchored(turn, content)

    def system(self, content: str) -> TurnIds:
        """The ids of a system prompt after a reply, or of its text alone where none is allowed."""
        try:
            ids, *others = (self._later_system(text) for text in (content, *OTHERS))
        except ModelError:
            ids, others = [], [[]]
        turn = self._find_content(ids, Role.SYSTEM, others, content)
        if turn.content[0] < turn.content[1]:
            return self._with_round_end(turn)
        ids = self.as_text(content)
        return self._with_round_end(TurnIds(ids, [Role.SYSTEM] * len(ids), (0, len(ids))))

    def assistant(self, content: str) -> TurnIds:
        """The ids of the text of a given reply, without the template's before and after it."""
        ids = self._reply(_message("assistant", content))
        if ids is None or not self._control.isdisjoint(ids):  # text has become control tokens
            ids = self.as_text(content)
        return self._anchored(TurnIds(ids, [Role.ASSISTANT] * len(ids), (0, len(ids))), content)

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the template itself writes the `<think>` that begins a reply's reasoning."""
        if "<think>" not in str(self._tokenizer.chat_template or ""):
            return False
        header = self._render([STUB_QUESTION], prompt=True)
        return str(self._tokenizer.decode(header[-8:])).rstrip().endswith("<think>")

    @property
    def closing(self) -> list[int]:
        """The ids to read after a reply: the template's, then an anchor if rounds end with one."""
        return [*self._closing, *self._round_end]

    def stop_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """The ids that stop generation; `declared` are those of the model's own settings."""
        # After a token that begins a turn, the model would write the next speaker's text.
        anchor = None if self._anchors is None else self._anchors.token_id
        return self.end_ids(declared) | (self._openers | self._unused_controls) - {anchor}

    def end_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """The ids by which the model ends its reply: `declared`, and the end of sequence.

        An added token that the template puts first after a reply is one, too.
        """
        ids = set(declared if isinstance(declared, list) else [declared])
        ids |= {self._tokenizer.eos_token_id}
        ids |= set(self._closing[:1]) & set(self._tokenizer.added_tokens_decoder)
        return frozenset(int(i) for i in ids if i is not None)

    def as_text(self, text: str) -> list[int]:
        """The ids of `text` alone, without anything from the chat template."""
        return self._control_tokens.text_ids(text)

    def _reply(self, message: Message) -> list[int] | None:
        """The ids of a reply; None if they can't be separated from the template's own."""
        header = self._render([STUB_QUESTION], prompt=True)
        chat = self._render([STUB_QUESTION, message, STUB_QUESTION], prompt=True)
        tail = self._after_answer(self._render([*STUB_HISTORY, STUB_QUESTION], prompt=True))
        end = len(chat) - len(tail)
        fits = chat[: len(header)] == header and chat[end:] == tail and end >= len(header)
        return chat[len(header) : end] if fits else None

    @cached_property
    def _closing(self) -> list[int]:
        alone = self._after_answer(self._render(STUB_HISTORY, prompt=False))
        followed = self._render([*STUB_HISTORY, STUB_QUESTION], prompt=True)
        return _common_start(alone, self._after_answer(followed))

    @property
    def _openers(self) -> set[int]:
        """Control tokens that begin a turn, or stand between a user's text and the reply.

        Of those before a text only the first: the others may also occur in replies.
        """
        known = self._tokenizer.added_tokens_decoder
        user, system = self.user(QUESTION), self.system(QUESTION)
        headers = [turn.ids[: turn.content[0]] for turn in (user, system)]
        openers = {next((i for i in header if i in self._control), None) for header in headers}
        # The reply's own header; marks of reasoning in it, which few call special, may come again.
        openers |= {
            i for i in user.ids[user.content[1] :] if i in self._control and known[i].special
        }
        return {i for i in openers if i is not None}

    @property
    def _unused_controls(self) -> set[int]:
        """Control tokens that the template never uses, or only at the chat's start."""
        used = {
            *self._render(STUB_HISTORY, prompt=False),
            *self._render([STUB_QUESTION], prompt=True),
        }
        source = str(self._tokenizer.chat_template or "")  # may name tokens for reasoning or tools
        known = self._tokenizer.added_tokens_decoder
        used |= {i for i in self._control if known[i].content in source}
        return set(self._control - (used - {self._tokenizer.bos_token_id}))

    @property
    def _control(self) -> frozenset[int]:
        return self._control_tokens.known

    def _written_texts(self) -> Iterator[str]:
        """What the template writes: its source, and chats, for names that it puts together."""
        yield str(self._tokenizer.chat_template or "")
        chat = [*STUB_HISTORY, STUB_QUESTION]
        for messages in (chat, [_message("system", QUESTION), *chat]):
            try:
                yield self._render_text(messages, prompt=True)
            except ModelError:  # such as for the role `system`
                return

    @property
    def _round_end(self) -> list[int]:
        """The anchor that ends each reply and system prompt, if rounds end with one."""
        anchors = self._anchors
        if anchors is None or anchors.token_id is None or anchors.per != "round":
            return []
        return [anchors.token_id]

    def _with_round_end(self, turn: TurnIds) -> TurnIds:
        anchor = self._round_end
        return TurnIds(
            [*turn.ids, *anchor], [*turn.roles, *[Role.TEMPLATE] * len(anchor)], turn.content
        )

    def _anchored(self, turn: TurnIds, content: str) -> TurnIds:
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

    def _plain_template(self) -> str:
        """`_PLAIN` without the special tokens that the tokenizer does not have, or write."""
        template = _PLAIN
        for name in ("bos_token", "eos_token"):
            is_unused = name == "bos_token" and getattr(self._tokenizer, "adds_bos", None) is False
            if is_unused or getattr(self._tokenizer, name) is None:
                template = template.replace("{{ " + name + " }}", "")
        return template

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> list[int]:
        ids = self._control_tokens.ids(self._render_text(messages, prompt=prompt))
        begin = self._tokenizer.bos_token_id
        if getattr(self._tokenizer, "adds_bos", None) and ids[:1] != [begin]:
            return [begin, *ids]
        return ids

    def _render_text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        texts = [value for message in messages for name, value in message.items() if name != "role"]
        size = sum(len(str(text)) for text in (*texts, *(self._tools or ())))
        try:
            source = self._template or self._tokenizer.get_chat_template()
            return render(
                source,
                size,
                messages=self._marked(messages),
                add_generation_prompt=prompt,
                tools=self._marked(self._tools),
                tools_in_user_message=False,  # of Llama: they are pinned with the system prompt
                documents=None,
                **self._tokenizer.special_tokens_map,
            )
        except TemplateError as error:
            problem = _brief(error)
            raise ModelError(f"the model's chat template refuses this turn: {problem}") from error
        except Exception as error:  # a template is a program, and may fail in any way
            problem = f"{type(error).__name__}: {_brief(error)}"
            raise ModelError(f"the model's chat template fails: {problem}") from error

    def _marked(self, value: Any) -> Any:
        """A copy of `value` in which marks around control tokens say that these are plain text."""
        if isinstance(value, str):
            return self._control_tokens.marked(value)
        if isinstance(value, dict):
            return {name: self._marked(item) for name, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _after_answer(self, ids: list[int]) -> list[int]:
        """The part of a rendered conversation that follows the stub answer."""
        marker = self._answer_ids
        for start in range(len(ids) - len(marker) + 1):  # the first match: the stub precedes all
            if ids[start : start + len(marker)] == marker:
                return ids[start + len(marker) :]
        raise ModelError("the chat template has no recognizable end of a reply")

    @cached_property
    def _answer_ids(self) -> list[int]:
        ids = self._render(STUB_HISTORY, prompt=False)
        other = self._render([STUB_QUESTION, _message("assistant", ANSWER + " a")], prompt=False)
        start = len(_common_start(self._render([STUB_QUESTION], prompt=False), ids))
        answer = ids[start : len(_common_start(ids, other))]
        if ANSWER not in self._tokenizer.decode(answer):
            raise ModelError("the chat template does not show the reply's text")
        while answer[1:] and ANSWER in self._tokenizer.decode(answer[1:]):
            answer = answer[1:]
        return answer

    def _find_content(
        self, ids: list[int], role: Role, others: Sequence[list[int]], content: str
    ) -> TurnIds:
        """Find which `ids` of a turn are the text's, with the `role`, and which the template's.

        `others` are the same turn with other texts: the ids with which all begin or end are the
        template's. If the template makes control tokens of the text, `content` is read without it.
        """
        if self._has_made_controls(ids, others):
            turn = self._find_content(others[0], role, others[1:], content)
            return _replaced(turn, turn.content, self.as_text(content), role)
        start = min(len(_common_start(ids, other)) for other in others)
        tail = min(len(_common_start(ids[::-1], other[::-1])) for other in others)
        end = max(start, len(ids) - tail)
        roles = [role if start <= i < end else Role.TEMPLATE for i in range(len(ids))]
        return TurnIds(ids, roles, (start, end))

    def _has_made_controls(self, ids: list[int], others: Sequence[list[int]]) -> bool:
        """Whether a turn has control tokens that the same turn with `others` has not."""
        usual = Counter[int]()
        for other in others:
            usual |= Counter(i for i in other if i in self._control)
        return bool(Counter(i for i in ids if i in self._control) - usual)

    def _opening_of_plain(self, content: str, system: str) -> tuple[TurnIds, TurnIds]:
        """The opening, with a system prompt of which the template makes control tokens."""
        block, rest = self.opening(content, OTHERS[0])
        assert block is not None
        start = block.roles.index(Role.SYSTEM)
        place = start, start + block.roles.count(Role.SYSTEM)
        block = _replaced(block, place, self.as_text(system), Role.SYSTEM)
        return replace(block, content=(0, len(block.ids) - len(self._round_end))), rest

    def _first_turn_ids(self, system: str | None, content: str) -> list[int]:
        """The ids of the system prompt, if there is one, and of the first user turn."""
        if system and not self._allows_system:
            return self._render([_message("user", f"{system}\n\n{content}")], prompt=True)
        before = [_message("system", system)] if system else []
        return self._render([*before, _message("user", content)], prompt=True)

    @cached_property
    def _allows_system(self) -> bool:
        try:
            self._render([_message("system", QUESTION), STUB_QUESTION], prompt=True)
        except ModelError:
            return False
        return True

    @cached_property
    def _later_turns(self) -> list[list[int]]:
        return [self._later_user(text) for text in OTHERS]

    def _later_user(self, content: str) -> list[int]:
        ids = self._render([*STUB_HISTORY, _message("user", content)], prompt=True)
        return self._after_answer(ids)[len(self._closing) :]

    def _later_system(self, content: str) -> list[int]:
        """What a system message adds after a reply; empty if it is put at another place."""
        ids = self._render([*STUB_HISTORY, _message("system", content)], prompt=False)
        after, closing = self._after_answer(ids), self._closing
        return after[len(closing) :] if after[: len(closing)] == closing else []

    def _system_length(self, system: str, ids: list[int]) -> int:
        """How many of the first `ids` are the system prompt's; 0 if it is in the user's turn."""
        try:
            block = self._render([_message("system", system)], prompt=False)
            other = self._render([_message("system", QUESTION)], prompt=False)
        except ModelError:
            return 0
        return len(block) if block != other and ids[: len(block)] == block else 0


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _replaced(turn: TurnIds, place: tuple[int, int], ids: list[int], role: Role) -> TurnIds:
    """The turn with `ids` from the start to the end (exclusive) of `place`, as its text."""
    start, end = place
    return TurnIds(
        [*turn.ids[:start], *ids, *turn.ids[end:]],
        [*turn.roles[:start], *[role] * len(ids), *turn.roles[end:]],
        (start, start + len(ids)),
    )


def _common_start(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The ids with which both `left` and `right` begin."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return list(left[:count])


def _brief(error: Exception) -> str:
    return "".join(char if char.isprintable() else " " for char in str(error)[:200])
