"""The parts of a reply: finds the marks around them, and splits a reply while it is generated.

Parts are reasoning, answer and tool calls. Stub messages are rendered to see what the chat template
writes around them. In marks and in replies, private-use characters stand around each control token
(see `tokenizer.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.text.detokenizer import TextStream
from sirchat.text.tokenizer import CONTROL_END, CONTROL_START

Part = Literal["thinking", "answer", "call"]
_Next = Part | Literal["end"] | None  # what a mark begins; None: another mark tells

_MAX_HEADER_CHARS = 300  # characters of the header of a message

# Marks of reasoning where rendering does not tell them; the first pair is that of unknown models.
REASONING_MARKS = (
    *(("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")),
    *(("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    *(("<|inner_prefix|>", "<|inner_suffix|>"), ("<thinking>", "</thinking>")),
    ("<reasoning>", "</reasoning>"),
)
# Control tokens that stand in replies, though templates need not name them.
REPLY_CONTROLS = frozenset(
    {"<|constrain|>", "<|channel>", "<|begin_of_box|>", "<|end_of_box|>"}.union(*REASONING_MARKS)
)

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


def prefix_length(left: Sequence[object], right: Sequence[object]) -> int:
    """The length of the longest prefix that `left` and `right` have in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def without_delimiters(text: str) -> str:
    return text.replace(CONTROL_START, "").replace(CONTROL_END, "")


class Piece(NamedTuple):
    """New text of a part of a reply.

    `end` is the number of the reply's characters up to the end of this text, with marks.
    """

    text: str
    part: Part
    end: int


class PartSplitter:
    """Splits a reply that comes in pieces, with private-use characters around control tokens.

    Blanks beside a mark belong to no part. Control tokens that are no marks are dropped if
    `hidden`. `bounds` has the index where each part begins (at its mark), or the reply ends.
    """

    def __init__(self, marks: Marks, hidden: Collection[str] = ()) -> None:
        self._marks, self._hidden, self._head = marks, hidden, marks.head
        between = marks.closing.removeprefix(marks.end) if marks.end else ""
        begins: dict[str, _Next] = {marks.opening: "thinking", marks.call: "call"}
        ends: dict[str, _Next] = {marks.closing: None, marks.end: "end"} if marks.end else {}
        again = {mark: part for mark, part in begins.items() if CONTROL.match(mark)}
        self._first: dict[str, _Next] = {**begins, marks.answer: "answer", between: None}
        self._later: dict[Part, dict[str, _Next]] = {  # by the part in which they stand
            "thinking": {marks.closing: None, marks.end: None},
            "answer": {**ends, **again, marks.stop: "end"},
            "call": ends,
        }
        for table in (self._first, *self._later.values()):
            table.pop("", None)
        self._part: Part | None = None
        self._is_after_mark = marks.opens_in_header
        self._parts_seen = set[Part]()
        self._waiting, self._at = "", 0  # the text not divided yet, and its index
        self._count = 0  # characters before it, without those of private use
        self.bounds: list[tuple[int, _Next]] = []
        self.stop_text = without_delimiters(marks.stop).strip()

    @property
    def has_ended(self) -> bool:
        """Whether the reply is complete, because the next speaker's turn begins."""
        return bool(self.bounds) and self.bounds[-1][1] == "end"

    def push(self, text: str, *, is_end: bool = False) -> list[Piece]:
        """Add a piece of the reply; returns the new text of its parts.

        Text that may begin a mark is held back, unless `is_end` says that nothing follows.
        """
        pieces: list[Piece] = []
        self._waiting += text
        while self._waiting and not self.has_ended:
            step = self._continue_part if self._part else self._begin_part
            if not step(pieces, is_end):
                break
        return pieces

    def _begin_part(self, pieces: list[Piece], is_end: bool) -> bool:
        """Find out which part begins; returns False if that needs more text."""
        first, (begin, stop), text = self._first, self._head, self._waiting.lstrip()
        blanks, heads = len(self._waiting) - len(text), (begin, "to=") if begin else ()
        if begin and text.startswith(heads):
            head, found, _ = text.partition(stop)
            if found:
                first = {head + stop: self._part_after(head + stop)}
            elif not is_end and len(head) < _MAX_HEADER_CHARS:
                return False
        mark = max(filter(text.startswith, first), key=len, default="")
        longer = (other for other in (*first, *heads) if len(other) > len(mark))
        if not is_end and any(other.startswith(text) for other in longer):
            return False
        usual: Part = "thinking" if self._marks.opens_in_header and not self.bounds else "answer"
        begun = first[mark] if mark else usual
        is_marked = self._is_after_mark or bool(mark)
        if is_marked and begun != "thinking":  # to which the blanks before it belong
            self._take(blanks)
        self._enter(begun)
        self._is_after_mark = is_marked and begun != "call"
        if mark and begun != "call":
            self._take(len(self._waiting) - len(text) + len(mark))
        return True

    def _part_after(self, head: str) -> _Next:
        words, thinks = (CONTROL.sub(" ", mark).split() for mark in (head, self._marks.opening))
        is_call = any(word.startswith("to=") for word in words)
        usual: Part = "answer" if {*thinks}.isdisjoint(words) else "thinking"
        return self._first.get(head, "call" if is_call else usual)

    def _continue_part(self, pieces: list[Piece], is_end: bool) -> bool:
        """Add this part's text to `pieces`, up to a mark; returns False if there is no mark yet."""
        part, later = self._part, self._later[self._part or "answer"]
        at, mark = self._find(later, is_end)
        size = len(self._waiting[:at].rstrip()) if part == "thinking" else at
        text = CONTROL.sub(self._written, self._take(size))
        if part and (text := text.lstrip() if self._is_after_mark else text):
            gap = "\n\n" if self._is_after_mark and part in self._parts_seen else ""
            pieces.append(Piece(gap + text, part, self._count))
            self._parts_seen.add(part)
            self._is_after_mark = False
        if mark:
            self._take(at - size)  # blanks
            self._enter(later[mark])
            self._is_after_mark = later[mark] != "call"
            self._take(len(mark) if later[mark] in (None, "thinking") else 0)
        return bool(mark)

    def _find(self, marks: Collection[str], is_end: bool) -> tuple[int, str]:
        """The first mark and its index; or the index where a mark may begin, and ""."""
        text, firsts = self._waiting, {mark[0] for mark in marks}
        for at in range(len(text)):
            if text[at] in firsts:
                mark = max((m for m in marks if text.startswith(m, at)), key=len, default="")
                longer = (other for other in marks if len(other) > len(mark))
                if not is_end and any(other.startswith(text[at:]) for other in longer):
                    return at, ""
                if mark:
                    return at, mark
        return len(text), ""

    def _enter(self, begun: _Next) -> None:
        self._part = None if begun == "end" else begun
        if begun and (not self.bounds or self.bounds[-1][1] != begun):
            self.bounds.append((self._at, begun))

    def _take(self, size: int) -> str:
        text, self._waiting = self._waiting[:size], self._waiting[size:]
        self._at += size
        self._count += len(without_delimiters(text))
        return text

    def _written(self, control: re.Match[str]) -> str:
        """The text that a control token adds to a part, if it is no mark."""
        return "" if self._part != "call" and control[1] in self._hidden else control[1]


class ReplyStream(PartSplitter):
    """Turns the ids of a reply, one at a time, into the text of its parts.

    `controls` are the texts of control tokens by id; special ones are not shown. A history has
    neither reasoning nor the last `unkept_header` ids before the reply.
    """

    def __init__(
        self, tokenizer: Any, marks: Marks, controls: Mapping[int, str], unkept_header: int = 0
    ) -> None:
        known = tokenizer.added_tokens_decoder
        super().__init__(marks, {text for i, text in controls.items() if known[i].special})
        self._controls, self.unkept_header = controls, unkept_header
        self._text = TextStream(tokenizer)
        self._reply = ""
        self._ends: list[int] = []  # of each token in it

    def push_id(self, token_id: int) -> list[Piece]:
        if (control := self._controls.get(token_id)) is None:
            text = self._text.push(token_id)
        else:
            text = f"{self._text.flush()}{CONTROL_START}{control}{CONTROL_END}"
        self._reply += text
        self._ends.append(len(self._reply))
        return self.push(text)

    def push_ids(self, ids: Iterable[int]) -> None:
        """Add all ids of a whole reply."""
        for token_id in ids:
            self.push_id(token_id)
        self.flush()

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the reply."""
        return self.push(self._text.flush(), is_end=True)

    def tokens(self, part: Part | Literal["end"]) -> NDArray[np.int64]:
        """Indices of the tokens of one part and its marks, or of the tokens that end the reply."""
        starts, ends = self._edges()
        mask = np.zeros(len(ends), bool)
        for (start, name), (stop, _) in pairwise([*self.bounds, (len(self._reply), None)]):
            if name == part:  # a token that also has text of another part belongs to none
                mask |= (starts >= start) & (starts < stop) & (ends <= stop)
        return np.flatnonzero(mask)

    def tokens_not_in_history(self) -> NDArray[np.int64]:
        """Indices of the tokens of reasoning that the template leaves out of a history.

        Empty if the reply has no answer, or calls tools: templates then keep the reasoning.
        """
        names, thought = [name for _, name in self.bounds], self.tokens("thinking")
        if "answer" not in names or "call" in names:
            return thought[:0]
        lead = self._reply[: self.bounds[1][0]] if names[0] == "thinking" else ""
        lead += self._marks.answer * self._reply.startswith(self._marks.answer, len(lead))
        kept = self._marks.history_lead
        size = prefix_length(lead[::-1], kept[::-1])
        first = prefix_length(lead[: len(lead) - size], kept[: len(kept) - size]) if size else 0
        starts, ends = (edges[thought] for edges in self._edges())
        return thought[(starts >= first) & ((ends <= len(lead) - size) | (starts >= len(lead)))]

    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ends = np.asarray(self._ends, np.int64)
        return np.concatenate([[0], ends[:-1]])[: len(ends)], ends
