"""Finds the marks around the parts of a model's replies: reasoning, answer and tool calls.

Stub messages are rendered to see what the chat template writes around them. In marks and in
replies, private-use characters stand around each control token (see `tokenizer.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sirchat.text.tokenizer import CONTROL_END, CONTROL_START

# Marks of reasoning where rendering does not tell them; the first pair is that of unknown models.
REASONING_MARKS = (
    *(("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")),
    *(("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    *(("<|inner_prefix|>", "<|inner_suffix|>"), ("<thinking>", "</thinking>")),
    ("<reasoning>", "</reasoning>"),
)
# Control tokens that stand in replies, though templates need not name them.
REPLY_CONTROLS = frozenset({"<|constrain|>", "<|channel>"}.union(*REASONING_MARKS))

# Before calls of models whose templates may write none: LFM2, Llama, Mistral, Phi.
_CALL_MARKS = ("<|tool_call_start|>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>")

Message = dict[str, Any]

# Only letters, as the stubs of `template`.
_QUESTION, _THOUGHT, _ANSWER = "qzv", "xqwv", "zqxv"
SAMPLE_CALL: Message = {"name": "vxqz", "arguments": {_QUESTION: _ANSWER}}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message's reasoning
# A mark such as `<|im_end|>` or `[INST]`, or a line such as `### Instruction:` or `### User`.
_TEXT_AT_END = re.compile(r"(<[^<>\s]*\w[^<>\s]*>|\[[A-Z]+\])|.*\w.*[:：\]>]\Z|#+ .*\w\Z")
_SWITCHES, _EFFORT = ("enable_thinking", "thinking", "reasoning"), "reasoning_effort"
_PARTS = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]

_OPENS = re.compile("start|begin", re.IGNORECASE)
_UNPAIRED = re.compile(
    r"text|turn|sentence|sequence|document|message|header|role|prompt|inst|utterance|im_|\A<s>"
    r"|\A<\|(start|begin)\|>",
    re.IGNORECASE,
)
CONTROL = re.compile(f"{CONTROL_START}([^{CONTROL_END}]*){CONTROL_END}")
_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_UNIT = re.compile(rf"{CONTROL_START}[^{CONTROL_END}]*{CONTROL_END}|{_TAG}|.", re.DOTALL)
_LEAD = re.compile(rf"(?:{CONTROL.pattern}|<)?[^\s\"'<>{CONTROL_END}]*\Z")


@dataclass(frozen=True)
class Marks:
    """The texts around the parts of a reply; "" if the template has no such mark."""

    opening: str = ""  # before reasoning
    closing: str = ""  # after reasoning
    opens_in_header: bool = False  # whether the template writes `opening` before a reply
    answer: str = ""  # before an answer, such as `<|channel|>final<|message|>`
    end: str = ""  # after each message, if a reply may consist of several
    history_lead: str = ""  # all that the template writes before an answer in a history
    call: str = ""  # before tool calls
    call_end: str = ""  # the control token that ends a reply after its calls
    call_lead: str = ""  # before the name of a called tool; "" if the name is in JSON
    call_sample: str = ""  # a reply with `SAMPLE_CALL`, as the template writes it
    has_text_arguments: bool = False  # whether arguments must be a text (DeepSeek)
    stop: str = ""  # the beginning of the next speaker's turn

    @property
    def controls(self) -> set[str]:
        """The control tokens in the marks around parts; they do not end a reply."""
        marks = (self.opening, self.closing, self.answer, self.call)
        return {token for mark in marks for token in CONTROL.findall(mark)}

    @property
    def head(self) -> tuple[str, str]:
        """The start and the end of a header whose middle names the part that follows, or "".

        In `<|channel|>final<|message|>`, these are the two control tokens.
        """
        opening, answer = _units(self.opening), _units(self.answer)
        begin = "".join(opening[: prefix_length(opening, answer)])
        is_head = begin and begin != self.answer and opening[-1] == answer[-1]
        return (begin, opening[-1]) if is_head and CONTROL.match(opening[-1]) else ("", "")


@dataclass(frozen=True)
class Switches:
    """The variables by which a chat template turns reasoning on or off.

    `thinking` names the variable that is true or false, or is "". `has_effort` says whether
    `reasoning_effort` sets the length of reasoning; `no_effort` is its value for no reasoning.
    """

    thinking: str = ""
    has_effort: bool = False
    no_effort: str = ""

    def variables(self, wanted: str) -> dict[str, Any]:
        """The variables for a value of the setting `reasoning`; {} for the template's default."""
        if wanted == "auto" or (wanted == "medium" and not self.has_effort):
            return {}
        found: dict[str, Any] = {self.thinking: wanted != "off"} if self.thinking else {}
        if self.no_effort and not found:
            usual = wanted if self.has_effort and wanted != "on" else "high"
            return {_EFFORT: self.no_effort if wanted == "off" else usual}
        if self.has_effort and wanted == "off":
            return found or {_EFFORT: "low"}
        return found | ({_EFFORT: wanted} if self.has_effort and wanted != "on" else {})

    def problem(self, wanted: str) -> str:
        """Why the setting `reasoning` can't have this value exactly; "" if it can."""
        is_off = wanted == "off"
        if wanted == "auto" or self.thinking or self.no_effort or (self.has_effort and not is_off):
            return ""
        if self.has_effort:
            return "this model's reasoning can't be switched off; its effort is low"
        return f"reasoning {wanted} has no effect: the model's chat template has no switch for it"


def find_switches(render: Callable[[dict[str, Any]], str | None], source: str) -> Switches:
    """Find the switches of a chat template: variables in its `source` that change a chat.

    `render` renders a chat with some variables, and returns None if the template refuses.
    """

    def matters(name: str, *values: object) -> bool:
        texts = {render({name: value}) for value in values if name in source} - {None}
        return len(texts) > 1

    thinking = next((name for name in _SWITCHES if matters(name, True, False)), "")
    named = (word for word in ("none", "no_think") if re.search(f"['\"]{word}['\"]", source))
    no_effort = next((word for word in named if matters(_EFFORT, word, "high")), "")
    return Switches(thinking, matters(_EFFORT, "low", "high"), no_effort)


def find_marks(
    render: Callable[[Sequence[Message], bool], str | None],
    spell: Callable[[str], str],
    source: str,
    added: Collection[str],
) -> Marks:
    """Find the marks of a chat template.

    `render` renders messages, with or without the header of a reply at the end, or returns None if
    refused. `spell` puts private-use characters around control tokens. If rendering shows no marks
    of reasoning, known marks in the template's `source` or the `added` tokens are used.
    """
    question = {"role": "user", "content": _QUESTION}
    reply: Message = {"role": "assistant", "content": _ANSWER}

    def rendered(*messages: Message, prompt: bool = False) -> str:
        return spell(render([question, *messages], prompt) or "")

    header = _units(rendered(prompt=True))
    told = _after(header, rendered(reply, question, prompt=True))
    history_lead, _, tail = told.partition(_ANSWER)
    thoughts = [{**reply, key: _THOUGHT} for key in REASONING_KEYS if key in source]
    thoughts += [{**reply, "content": _PARTS}] if "thinking" in source else []
    for message in thoughts:
        before, _, after = rendered(message).partition(_THOUGHT)
        closing, answer, _ = after.strip().partition(_ANSWER)
        opening = _after(header, before).strip()
        if answer and closing and not re.search("['\"]thinking", opening):  # no list as it is
            closing, units = closing.strip(), _units(before.rstrip())
            added_by_prompt = _after(units, "".join(header))
            opens_in_header = not opening and _units(closing)[0] not in added_by_prompt
            opening = opening or units[-1]
            break
    else:
        pairs = (pair for text in (source, added) for pair in REASONING_MARKS if pair[1] in text)
        opening, closing = map(spell, next(pairs, REASONING_MARKS[0]))
        opens_in_header = "".join(header).rstrip().endswith(opening)
    answer = history_lead.strip()
    if answer.startswith(opening) or answer[-1:].isalnum():  # around no reasoning; a mere word
        answer = ""
    if closing != answer:
        closing = closing.removesuffix(answer).rstrip()
    first = next(iter(_units(tail)), "")
    end = first if closing.startswith(first) else ""
    others = opening, closing, answer, first
    call = _find_call(header, rendered, others)
    if not call[0] and (known := next((mark for mark in _CALL_MARKS if mark in added), None)):
        call = spell(known), *call[1:]
    stop = _text_at_end(tail.partition(_QUESTION)[0])
    return Marks(opening, closing, opens_in_header, answer, end, history_lead, *call, stop)


def _text_at_end(between: str) -> str:
    """The text that ends a reply, if no control token stands `between` reply and question."""
    # Such as `<|im_end|>` in a vocabulary without this token, or a line `### Instruction:`.
    line = between.strip().partition("\n")[0].rstrip()
    if CONTROL.search(between) or not (mark := _TEXT_AT_END.match(line)):
        return ""
    begins_line = "\n" in between[: len(between) - len(between.lstrip())]
    if mark[1]:  # it stands for itself wherever it is
        return mark[1]
    return f"\n{line}" + "\n" * line[-1].isalnum() if begins_line else ""


def _find_call(
    header: list[str], rendered: Callable[..., str], others: Sequence[str]
) -> tuple[str, str, str, str, bool]:
    """The fields of `Marks` about calls, in their order; `others` may precede a call."""
    message, sample = {"role": "assistant", "content": ""}, SAMPLE_CALL["name"]
    text = {"arguments": json.dumps(SAMPLE_CALL["arguments"])}
    for is_text in (False, True):
        function = SAMPLE_CALL | (text if is_text else {})
        calls = [{"id": "call00000", "type": "function", "function": function}]
        one, two = (_after(header, rendered({**message, "tool_calls": calls * n})) for n in (1, 2))
        before, name, after = one.partition(sample)
        if name:
            break
    else:
        return "", "", "", one, False
    lead = _LEAD.search(before)
    for mark in others:
        before = before.strip().removeprefix(mark)
    begun, told = CONTROL.match(before.strip()), without_delimiters(lead[0]) if lead else ""
    ends = [match[0] for match in CONTROL.finditer(after)]
    # What stands once after two calls does not end each of them.
    end = without_delimiters(ends[-1]) if ends and two.count(ends[-1]) < 2 else ""
    return begun[0] if begun else "", end, told, one, is_text


def _units(text: str) -> list[str]:
    """Split a text into control tokens, tags and single characters."""
    return [match[0] for match in _UNIT.finditer(text)]


def _after(header: list[str], text: str) -> str:
    """The rest of the text after the units with which both `text` and `header` begin."""
    units = _units(text)
    return "".join(units[prefix_length(header, units) :])


def paired_controls(names: Collection[str]) -> set[str]:
    """The names of control tokens that open and close a part of a text, such as a box.

    Pairs around a whole text, a turn or a header do not count.
    """
    found = set[str]()
    for name in names:
        closing = _OPENS.sub(lambda word: "END" if word[0].isupper() else "end", name)
        closing = re.sub(r"\A([<\[])(?=\w)", r"\1/", name) if closing == name else closing
        if closing != name and closing in names and not _UNPAIRED.search(name):
            found |= {name, closing}
    return found


def prefix_length(left: Sequence[object], right: Sequence[object]) -> int:
    """The length of the longest prefix that `left` and `right` have in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def without_delimiters(text: str) -> str:
    return text.replace(CONTROL_START, "").replace(CONTROL_END, "")
