"""Splits a reply, while it is generated, into reasoning, answer and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.text.detokenizer import TextStream
from sirchat.text.reply_marks import CONTROL, Marks, prefix_length, without_delimiters
from sirchat.text.tokenizer import CONTROL_END, CONTROL_START

Part = Literal["thinking", "answer", "call"]
_Next = Part | Literal["end"] | None  # what a mark begins; None: another mark tells

_MAX_HEADER_CHARS = 300  # characters of the header of a message


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

    `controls` are the ids of control tokens; special ones are not shown. A history has neither
    reasoning nor the last `unkept_header` ids before the reply.
    """

    def __init__(
        self, tokenizer: Any, marks: Marks, controls: Iterable[int], unkept_header: int = 0
    ) -> None:
        known = tokenizer.added_tokens_decoder
        self._controls = {i: known[i].content for i in controls}
        super().__init__(marks, {text for i, text in self._controls.items() if known[i].special})
        self.unkept_header = unkept_header
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
