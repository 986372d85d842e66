"""A reply's reasoning, which some models write between `<think>` tags: its tokens, its text."""

from __future__ import annotations

import re

import numpy as np

from sirchat.chat.snapshot import Positions, Texts
from sirchat.memory.ledger import Ledger, Role
from sirchat.text.detokenizer import tokens_matching

OPEN, CLOSE = "<think>", "</think>"

_THOUGHT = re.compile(r"(?:<think>|\A(?!.*?<think>.*?</think>)).*?</think>", re.DOTALL)
"""Tags included. Some templates open the first tag themselves, so that a reply only closes it."""


def reasoning(ledger: Ledger, texts: Texts, turn: int) -> Positions:
    """Stream positions [k], ascending, of the reasoning in a reply; of none that is unfinished."""
    in_turn = ledger.column("turn") == turn
    said = np.flatnonzero(in_turn & (ledger.column("role") == Role.ASSISTANT))
    at = said.tolist()
    pieces = texts(ledger.column("token_id")[said].tolist(), at)
    return said[tokens_matching(_THOUGHT, pieces)]


def thought(reply: str, *, is_open: bool = False) -> str:
    """The reasoning in a reply, without the tags; empty if there is none.

    `is_open`: the template itself writes the first tag, so that a reply without any is all
    reasoning.
    """
    found = "\n\n".join(one[0] for one in _THOUGHT.finditer(reply))
    if not found and (is_open or reply.lstrip().startswith(OPEN)):
        found = reply  # it was cut off
    return found.replace(OPEN, "").replace(CLOSE, "").strip()


class FinalAnswer:
    """What follows a reply's reasoning, while the reply is generated.

    Args:
        is_open: whether the reply begins amid reasoning, for the template wrote its tag.

    Attributes:
        has_thought: whether the reply began with reasoning.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._thinks: bool | None = is_open or None  # None: not known yet
        self.has_thought = is_open
        self._held = ""
        self._has_begun = False

    def push(self, text: str) -> str:
        """Add text of the reply; returns what of the answer it brought."""
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
        """The rest of the answer, at the end of the reply."""
        return self._held if self._thinks is None else ""
