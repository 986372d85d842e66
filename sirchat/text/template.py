"""Turns each new turn of a chat into token ids, by the model's chat template.

Only the new turn is rendered, after a stub question and a stub answer in place of the history; the
ids after the stub answer are the new ones. Text from the user never becomes a control token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from jinja2.exceptions import TemplateError

from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.text.anchors import Anchors, with_anchors
from sirchat.text.reply_parts import (
    REASONING_KEYS,
    REPLY_CONTROLS,
    Marks,
    ReplyStream,
    Switches,
    find_marks,
    find_switches,
    prefix_length,
)
from sirchat.text.template_sandbox import render
from sirchat.text.tokenizer import ControlTokens

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

# The reasoning with which a reply begins; the template may have written its `<think>`.
_LEADING_REASONING = re.compile(r"\s*(<think>)?(.*?)</think>\s*", re.DOTALL)

# Only letters: tokenizers do not merge them with the control token, space or newline after them.
QUESTION_TEXT = "qzv"
ANSWER_TEXT = "zqxv"
OTHER_TEXTS = ("a", "7 b")

Message = dict[str, Any]

STUB_QUESTION: Message = {"role": "user", "content": QUESTION_TEXT}
STUB_HISTORY: list[Message] = [STUB_QUESTION, {"role": "assistant", "content": ANSWER_TEXT}]
_STUB_THOUGHT: Message = STUB_HISTORY[1] | dict.fromkeys(REASONING_KEYS, "a")


@dataclass(frozen=True)
class TurnIds:
    """The token ids that the model reads for one turn."""

    ids: list[int]  # [n], of the message's text, and what the template adds around it
    roles: list[Role]  # [n], who wrote each id; `TEMPLATE` for those that the template adds
    content: tuple[int, int]  # start and end (exclusive) of the ids of the message's text
    # Of a user turn: with which ids of the next reply's header it ends; None: those of a generated
    # reply, all of them.
    header: list[int] | None = None
    closing: list[int] | None = None  # of a reply, if not that of its template


class Template:
    """Turns messages into token ids, one turn at a time.

    Without a chat template, the format is `USER: ... ASSISTANT: ...`. Anchor tokens are inserted
    where `anchors.per` says. `ends` are the ids by which the model's settings end a reply. Methods
    raise ModelError if the template can't render a turn.
    """

    tools: str | None = None  # of a chat in which the model may call some, as JSON or ""
    _tools: Sequence[Message] | None = None
    _in_parts = False  # whether the template takes no content but a list of parts

    def __init__(
        self,
        tokenizer: Any,
        anchors: Anchors | None = None,
        ends: int | Iterable[int] | None = None,
    ) -> None:
        self._variables: dict[str, Any] = {}  # which the template gets beside messages and tools
        self._by_reasoning = {"auto": self}  # shared by all of these
        self._tokenizer = tokenizer
        self._anchors = anchors if anchors is not None and anchors.variant == "ac" else None
        end = self._anchors.token_id if self._anchors and self._anchors.per == "round" else None
        self._round_end = [] if end is None else [end]  # after each reply and system prompt
        self._source = str(tokenizer.chat_template or "")
        self._template = None if self._source else _plain_template(tokenizer)
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._control_tokens = ControlTokens(tokenizer)
        self._control_tokens = ControlTokens(tokenizer, self._written_texts(), self.ends)
        self.controls = self._control_tokens.by_id  # by id; text never becomes one of them
        tokenizer.chat_control_tokens = list(self.controls.values())  # also for transformers

    def with_reasoning(self, wanted: str) -> Self:
        """A copy for this value of the setting `reasoning`; the same if there is no switch."""
        known: dict[str, Any] = self._by_reasoning
        if wanted not in known:
            switches = self.switches  # which the copy has, too
            known[wanted] = other = copy(self)
            other._variables = switches.variables(wanted)
            for name in set(vars(other)) - {"switches"}:
                if isinstance(getattr(type(other), name, None), cached_property):
                    delattr(other, name)  # it was computed without them
        found: Self = known[wanted]
        return found

    @cached_property
    def switches(self) -> Switches:
        def rendered(variables: dict[str, Any]) -> str | None:
            other = copy(self)
            other._variables = variables
            with suppress(ModelError):
                return other._render_text([STUB_QUESTION], prompt=True)
            return None

        return find_switches(rendered, self._source)

    def opening(self, content: str, system: str | None = None) -> tuple[TurnIds | None, TurnIds]:
        """The ids of the system prompt (None without one), and those of the first user turn.

        If the template writes the prompt inside the user's turn, the turn is split in two. If it
        does not write the whole prompt, the prompt stands before the user's text.
        """
        shown = not system or self._shows(system)
        ids = self._first_turn_ids(system, content, shown)
        others = [self._first_turn_ids(system, other, shown) for other in OTHER_TEXTS]
        turn = self._find_content(ids, Role.USER, others, content)
        if not system:
            return None, self._anchored(turn, content)
        start, end = turn.content
        cut = self._system_length(system, turn.ids) or start
        ids = self._first_turn_ids(system, QUESTION_TEXT, shown)
        others = [self._first_turn_ids(other, QUESTION_TEXT, shown) for other in OTHER_TEXTS]
        if self._has_made_controls(ids, others):  # then the prompt's text is read alone
            stub, rest = self.opening(content, OTHER_TEXTS[0])
            assert stub is not None
            begin = stub.roles.index(Role.SYSTEM)
            place = begin, begin + stub.roles.count(Role.SYSTEM)
            block = _replaced(stub, place, self.as_text(system), Role.SYSTEM)
            whole = 0, len(block.ids) - len(self._round_end)
            return replace(block, content=whole), rest
        head = self._find_content(ids, Role.SYSTEM, others, system)
        block = TurnIds(turn.ids[:cut], head.roles[:cut], (0, cut))
        rest = TurnIds(turn.ids[cut:], turn.roles[cut:], (start - cut, end - cut))
        return self._with_round_end(block), self._anchored(rest, content)

    def user_turn(self, content: str, *, after_user: bool = False) -> TurnIds:
        """The ids of a user turn after the first, and of the header that begins the reply.

        `after_user`: the turn follows another user turn, which `followed_by` has cut, and no reply.
        """
        ids, others = self._later_user(content), self._later_turns
        if after_user:
            with suppress(ModelError):  # some templates refuse this; then as after a reply
                ids, *others = [self._user_after_user(text) for text in (content, *OTHER_TEXTS)]
        turn = self._find_content(ids, Role.USER, others, content)
        return self._anchored(turn, content)

    def followed_by(self, turn: TurnIds, role: str | None) -> TurnIds:
        """A user's `turn` as it stands before a given message of `role`, or, for None, a generated
        one.

        The end of the generation prompt, such as a mark of reasoning, may precede no given reply.
        """
        prompt, common = self._prompt
        start, is_user = len(turn.ids) - len(prompt), role in ("user", "tool")
        kept = prompt[: 0 if is_user else common if role in ("assistant", "calls") else None]
        if (kept == prompt and not is_user) or turn.ids[start:] != prompt:
            return turn
        end = start + len(kept)
        return TurnIds(turn.ids[:end], turn.roles[:end], turn.content, kept)

    def system_turn(self, content: str) -> TurnIds:
        """The ids of a system prompt that follows a reply.

        If the template allows no later system prompt, the ids of its text alone.
        """
        try:
            ids, *others = (self._later_system(text) for text in (content, *OTHER_TEXTS))
        except ModelError:
            ids, others = [], [[]]
        turn = self._find_content(ids, Role.SYSTEM, others, content)
        if turn.content[0] < turn.content[1] and self._shows(content):
            return self._with_round_end(turn)
        ids = self.as_text(content)
        return self._with_round_end(TurnIds(ids, [Role.SYSTEM] * len(ids), (0, len(ids))))

    def assistant_turn(self, content: str, header: list[int] | None = None) -> TurnIds:
        """The ids of a given reply's text, without those that the template writes after it.

        The unread ids of the reply's header come first; `header` is as in `TurnIds`.
        """
        ids = self._reply_ids(content)
        return self._anchored(self._after_header(ids, content, header), content)

    @cached_property
    def marks(self) -> Marks:
        def rendered(messages: Sequence[Message], prompt: bool) -> str | None:
            try:
                return self._render_text(messages, prompt=prompt)
            except ModelError:  # such as for calls of tools
                return None

        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        marks = find_marks(rendered, self._control_tokens.delimited, self._source, added)
        return marks if self._source else replace(marks, stop="\nUSER:")

    def reply_stream(self, *, in_history: bool = False) -> ReplyStream:
        """A splitter of a reply's ids into parts; `in_history`: the reply is a given one."""
        if in_history:
            marks = replace(self.marks, opens_in_header=False)
            return ReplyStream(self._tokenizer, marks, self.controls)
        prompt, kept = self._prompt
        return ReplyStream(self._tokenizer, self.marks, self.controls, len(prompt) - kept)

    @property
    def closing(self) -> list[int]:
        """The ids to read after a reply: the template's, and an anchor if rounds end with one."""
        return [*self._closing, *self._round_end]

    def stop_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """The ids that stop generation, including those `declared` by the model's settings.

        After a token that begins a turn, the model would write the next speaker's text.
        """
        known, controls = self._tokenizer.added_tokens_decoder, self.controls
        user, system = self.user_turn(QUESTION_TEXT), self.system_turn(QUESTION_TEXT)
        stops = set[int]()
        for turn in (user, system):  # the first one alone: the others may also occur in replies
            stops.update([i for i in turn.ids[: turn.content[0]] if i in controls][:1])
        # The reply's own header; marks of reasoning in it, which few call special, may come again.
        header = user.ids[user.content[1] :]
        stops |= {i for i in header if i in controls and known[i].special}
        # Tokens that templates use nowhere, or only at the start, are useless in replies; those for
        # reasoning or tools may be in the source alone.
        used = {i for i, text in controls.items() if text in self._source}
        used.update(self._render(STUB_HISTORY, prompt=False))
        used.update(self._render([STUB_QUESTION], prompt=True))
        stops |= controls.keys() - (used - {self._tokenizer.bos_token_id})
        anchor = None if self._anchors is None else self._anchors.token_id
        return self.end_ids(declared) | (stops - self._in_replies - {anchor})

    def end_ids(self, declared: int | list[int] | None) -> frozenset[int]:
        """The ids by which the model ends its reply: `declared`, and the end of sequence.

        Also an added token that the template writes first after a reply, or last after tool calls,
        unless it can occur within replies.
        """
        ids = set(declared if isinstance(declared, list) else [declared])
        ids |= {self._tokenizer.eos_token_id}
        written = {i for i, text in self.controls.items() if text == self.marks.call_end}
        written.update(self._tokenizer.added_tokens_decoder.keys() & set(self._closing[:1]))
        return frozenset(int(i) for i in ids | (written - self._in_replies) if i is not None)

    @property
    def _in_replies(self) -> set[int]:
        """Control tokens that may occur within a reply, and do not end it."""
        inside = self.marks.controls | REPLY_CONTROLS
        return {i for i, text in self.controls.items() if text in inside}

    def as_text(self, text: str) -> list[int]:
        """The ids of `text` alone, without anything from the chat template."""
        return self._control_tokens.text_ids(text)

    def _reply_ids(self, content: str) -> list[int] | None:
        """As `_reply` for a text; None also if the text would become control tokens."""
        for message in self._reply_messages(content):
            usual = self._replies
            if REASONING_KEYS[0] in message:
                usual = [self._reply(_STUB_THOUGHT) or []]
            ids = self._reply(message)
            if ids is not None and not self._has_made_controls(ids, usual):
                return ids
        return None

    def _reply_messages(self, content: str) -> list[Message]:
        """Messages with a reply's text, in several forms, as the template may remove reasoning."""
        source, plain = self._source, _message("assistant", content)
        thought = _LEADING_REASONING.match(content)
        if not thought or not (thought[1] or "</think>" in source):
            return [plain]
        rest = content[thought.end() :]
        if any(key in source for key in REASONING_KEYS):
            parts = dict.fromkeys(REASONING_KEYS, thought[2].strip())
            return [_message("assistant", rest) | parts, plain]
        marked = _Marked(thought[0] + self._control_tokens.delimited(rest))
        return [_message("assistant", marked), plain]

    def _reply(self, message: Message) -> list[int] | None:
        """The ids of a given reply's header and text; None if they can't be told from the rest."""
        # Not kept: it may have today's date, and a chat may go on past midnight.
        asked, tail = self._render([STUB_QUESTION], prompt=True), self._followed
        chat = self._render([STUB_QUESTION, message, STUB_QUESTION], prompt=True)
        start, end = len(asked) - len(self._prompt[0]), len(chat) - len(tail)
        fits = chat[:start] == asked[:start] and chat[end:] == tail and end >= start
        return chat[start:end] if fits else None

    @cached_property
    def _followed(self) -> list[int]:
        return self._after_answer(self._render([*STUB_HISTORY, STUB_QUESTION], prompt=True))

    @cached_property
    def _replies(self) -> list[list[int]]:
        return [self._reply(_message("assistant", text)) or [] for text in OTHER_TEXTS]

    def _after_header(
        self, ids: list[int] | None, content: str, header: list[int] | None
    ) -> TurnIds:
        """The ids of a given reply after the part `header` of its header, which was read before."""
        # Without ids that fit, such as where one token has letters of header and text, the text is
        # read alone.
        read = self._prompt[0] if header is None else header
        usual = self._replies[0][: prefix_length(*self._replies)]
        if ids is not None and ids[: len(read)] == read:
            rest = usual[len(read) : prefix_length(usual, ids)]
            text = ids[len(read) + len(rest) :]
        else:
            fits = usual[: len(read)] == read
            rest = usual[len(read) :] if fits else []
            text = self.as_text(self._written(content) if fits else content)
        start, end = len(rest), len(rest) + len(text)
        roles = [*[Role.TEMPLATE] * start, *[Role.ASSISTANT] * len(text)]
        return TurnIds([*rest, *text], roles, (start, end))

    def _written(self, content: str) -> str:
        """The part of a reply's text that the template writes; all of it if that is unknown."""
        replies = STUB_HISTORY[1], self._reply_messages(content)[0]
        told, chat = (
            self._render_text([STUB_QUESTION, m, STUB_QUESTION], prompt=True) for m in replies
        )
        start, _, end = told.partition(ANSWER_TEXT)
        fits = chat.startswith(start) and chat[len(start) :].endswith(end)
        return chat[len(start) : len(chat) - len(end)] if fits else content

    @cached_property
    def _prompt(self) -> tuple[list[int], int]:
        """The generation prompt, and how many of its first ids also precede a given reply."""
        asked, other = (self._render([STUB_QUESTION], prompt=prompt) for prompt in (True, False))
        if asked == other:  # some templates always write it
            with suppress(ModelError):
                other = self._render([STUB_QUESTION, STUB_QUESTION], prompt=True)
        start = prefix_length(asked, other)
        replies = STUB_HISTORY[1], _STUB_THOUGHT
        told = [self._render([STUB_QUESTION, m, STUB_QUESTION], prompt=True) for m in replies]
        common = min(prefix_length(asked, ids) for ids in told)
        return asked[start:], max(0, common - start)

    @cached_property
    def _closing(self) -> list[int]:
        alone = self._after_answer(self._render(STUB_HISTORY, prompt=False))
        return alone[: prefix_length(alone, self._followed)]

    def _written_texts(self) -> Iterator[str]:
        """Yield texts that have the template's control tokens: its source, and rendered chats."""
        yield self._source
        chat = [*STUB_HISTORY, STUB_QUESTION]
        for messages in (chat, [_message("system", QUESTION_TEXT), *chat]):
            with suppress(ModelError):  # such as for the role `system`
                if ANSWER_TEXT not in self._render_text(messages, prompt=True):
                    self._in_parts = True
                yield self._render_text(messages, prompt=True)

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

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> list[int]:
        ids = self._control_tokens.chat_ids(self._render_text(messages, prompt=prompt))
        begin = self._tokenizer.bos_token_id
        if getattr(self._tokenizer, "adds_bos", None) and ids[:1] != [begin]:
            return [begin, *ids]
        return ids

    def _render_text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        try:
            source = self._template or self._tokenizer.get_chat_template()
            return render(
                source,
                messages=self._marked(messages),
                add_generation_prompt=prompt,
                tools=self._marked(self._tools),
                tools_in_user_message=False,  # of Llama: they are pinned with the system prompt
                documents=None,
                **self._tokenizer.special_tokens_map,
                **self._variables,
            )
        except Exception as error:  # a template is a program, and may fail in any way
            kind, is_refusal = type(error).__name__, isinstance(error, TemplateError)
            what = "refuses this turn" if is_refusal else f"fails: {kind}"
            raise ModelError(f"the model's chat template {what}: {_brief(error)}") from error

    def _marked(self, value: Any) -> Any:
        """A copy of `value` with marks around control tokens, which make them plain text."""
        if isinstance(value, str):
            return value if isinstance(value, _Marked) else self._control_tokens.delimited(value)
        if isinstance(value, dict):
            marked = {name: self._marked(item) for name, item in value.items()}
            if isinstance(text := marked.get("content"), str):
                marked["content"] = [*_Marked(text)] if self._in_parts else _Marked(text)
            return marked
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _after_answer(self, ids: list[int]) -> list[int]:
        marker = self._answer_ids
        for start in range(len(ids) - len(marker) + 1):  # the first match: the stub precedes all
            if ids[start : start + len(marker)] == marker:
                return ids[start + len(marker) :]
        raise ModelError("the chat template has no recognizable end of a reply")

    @cached_property
    def _answer_ids(self) -> list[int]:
        ids = self._render(STUB_HISTORY, prompt=False)
        reply = _message("assistant", ANSWER_TEXT + " a")
        other = self._render([STUB_QUESTION, reply], prompt=False)
        start = prefix_length(self._render([STUB_QUESTION], prompt=False), ids)
        answer = ids[start : prefix_length(ids, other)]
        if ANSWER_TEXT not in self._tokenizer.decode(answer):
            raise ModelError("the chat template does not show the reply's text")
        while answer[1:] and ANSWER_TEXT in self._tokenizer.decode(answer[1:]):
            answer = answer[1:]
        return answer

    def _find_content(
        self, ids: list[int], role: Role, others: Sequence[list[int]], content: str
    ) -> TurnIds:
        """Find which `ids` of a turn are those of the text, of `role`, and which the template's."""
        # `others` are the same turn with other texts: ids with which all begin or end are the
        # template's. If the template makes control tokens of the text, `content` is read alone.
        if self._has_made_controls(ids, others):
            turn = self._find_content(others[0], role, others[1:], content)
            return _replaced(turn, turn.content, self.as_text(content), role)
        start = min(prefix_length(ids, other) for other in others)
        tail = min(prefix_length(ids[::-1], other[::-1]) for other in others)
        end = max(start, len(ids) - tail)
        roles = [role if start <= i < end else Role.TEMPLATE for i in range(len(ids))]
        return TurnIds(ids, roles, (start, end))

    def _has_made_controls(self, ids: list[int], others: Sequence[list[int]]) -> bool:
        """Whether a turn has control tokens that the same turn with other texts lacks."""
        usual = Counter[int]()
        for other in others:
            usual |= Counter(i for i in other if i in self.controls)
        return bool(Counter(i for i in ids if i in self.controls) - usual)

    def _first_turn_ids(self, system: str | None, content: str, shown: bool) -> list[int]:
        """The ids up to the first user turn; a prompt that is not `shown` stands in its text."""
        if not shown:
            return self._render([_message("user", f"{system}\n\n{content}")], prompt=True)
        before = [_message("system", system)] if system else []
        return self._render([*before, _message("user", content)], prompt=True)

    def _shows(self, system: str) -> bool:
        """Whether the template writes the whole system prompt; some refuse, drop or cut it."""
        system = system if system.strip() else ANSWER_TEXT  # a blank one could not be seen
        try:
            chat = self._render_text([_message("system", system), STUB_QUESTION], prompt=True)
        except ModelError:
            return False
        prompt = "".join(self._control_tokens.delimited(system).split())  # blanks may be changed
        return prompt in "".join(chat.split()) and QUESTION_TEXT in chat

    @cached_property
    def _later_turns(self) -> list[list[int]]:
        return [self._later_user(text) for text in OTHER_TEXTS]

    def _later_user(self, content: str) -> list[int]:
        ids = self._render([*STUB_HISTORY, _message("user", content)], prompt=True)
        return self._after_answer(ids)[len(self._closing) :]

    def _user_after_user(self, content: str) -> list[int]:
        """The ids of a user turn after a user turn; raises ModelError if these change the first."""
        said = [*STUB_HISTORY, STUB_QUESTION]
        before = self._render(said, prompt=True)
        before = before[: len(before) - len(self._prompt[0])]
        ids = self._render([*said, _message("user", content)], prompt=True)
        if ids[: len(before)] != before:
            raise ModelError("the chat template changes a user turn that another one follows")
        return ids[len(before) :]

    def _later_system(self, content: str) -> list[int]:
        """The ids that a system message adds after a reply; [] if it moves to another place."""
        ids = self._render([*STUB_HISTORY, _message("system", content)], prompt=False)
        after, closing = self._after_answer(ids), self._closing
        return after[len(closing) :] if after[: len(closing)] == closing else []

    def _system_length(self, system: str, ids: list[int]) -> int:
        """How many of the first `ids` are the system prompt; 0 if it is inside the user's turn."""
        try:
            block = self._render([_message("system", system)], prompt=False)
            other = self._render([_message("system", QUESTION_TEXT)], prompt=False)
        except ModelError:
            return 0
        return len(block) if block != other and ids[: len(block)] == block else 0


def _plain_template(tokenizer: Any) -> str:
    """`_PLAIN` without the special tokens that the tokenizer lacks or does not write."""
    template = _PLAIN
    for name in ("bos_token", "eos_token"):
        is_unused = name == "bos_token" and getattr(tokenizer, "adds_bos", None) is False
        if is_unused or getattr(tokenizer, name) is None:
            template = template.replace("{{ " + name + " }}", "")
    return template


class _Marked(str):
    """Text with marks around control tokens, for templates that loop over a content's parts."""

    def __iter__(self) -> Iterator[Any]:
        yield {"type": "text", "text": str(self)}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _replaced(turn: TurnIds, place: tuple[int, int], ids: list[int], role: Role) -> TurnIds:
    """The turn with `ids` as its text, in place of its ids in the range `place`."""
    start, end = place
    return TurnIds(
        [*turn.ids[:start], *ids, *turn.ids[end:]],
        [*turn.roles[:start], *[role] * len(ids), *turn.roles[end:]],
        (start, start + len(ids)),
    )


def _brief(error: Exception) -> str:
    return "".join(char if char.isprintable() else " " for char in str(error)[:200])
