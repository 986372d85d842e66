"""Finds the reasoning in a reply: what stands between its tags `<think>` and `</think>`."""

from __future__ import annotations

import re

import numpy as np

from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Ledger, Role
from sirchat.text.detokenizer import Texts, tokens_matching

OPEN, CLOSE = "<think>", "</think>"

# The reasoning with its tags; if the template wrote `<think>`, the reply has the end tag alone.
_THOUGHT = re.compile(r"(?:<think>|\A(?!.*?<think>.*?</think>)).*?</think>", re.DOTALL)


def reasoning_positions(ledger: Ledger, texts: Texts, turn: int) -> Positions:
    """Positions [k], ascending, of the reasoning tokens and tags in the reply with index `turn`.

    Empty if the reply has no `</think>`.
    """
    in_turn = ledger.column("turn") == turn
    said = np.flatnonzero(in_turn & (ledger.column("role") == Role.ASSISTANT))
    pieces = texts(ledger.column("token_id")[said].tolist(), said.tolist())
    return said[tokens_matching(_THOUGHT, pieces)]


def thought(reply: str, *, is_open: bool = False) -> str:
    """The reasoning in a reply, without its tags; empty if there is none.

    `is_open`: the chat template writes `<think>`, so a reply without `</think>` is all reasoning.
    """
    text = "\n\n".join(match[0] for match in _THOUGHT.finditer(reply))
    if not text and (is_open or reply.lstrip().startswith(OPEN)):
        text = reply  # the reply was cut off
    return text.replace(OPEN, "").replace(CLOSE, "").strip()


class FinalAnswer:
    """Splits a reply, while it is generated, into the reasoning and the answer after it.

    `is_open`: the chat template wrote `<think>`. `has_thought`: the reply began with reasoning.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._thinks: bool | None = is_open or None  # None: not known yet
        self.has_thought = is_open
        self._held = ""
        self._has_begun = False

    def push(self, text: str) -> str:
        """Add the next text of the reply; returns the new text of the answer, or an empty text."""
        self._held += text
        if self._thinks is None and not OPEN.startswith(start := self._held.lstrip()):
            self._thinks = self.has_thought = start.startswith(OPEN)
        if self._thinks and CLOSE in self._held:
            self._thinks, self._held = False, self._held.partition(CLOSE)[2]
        if self._thinks is not False:
            return ""
        if self.has_thought and not self._has_begun:  # blank lines follow the tag
            self._held = self._held.lstrip()
            self._has_begun = bool(self._held)
        answer, self._held = self._held, ""
        return answer

    def end(self) -> str:
        """At the end of the reply, return the text of the answer that `push` has not returned."""
        return self._held if self._thinks is None else ""
