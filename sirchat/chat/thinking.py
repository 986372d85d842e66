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
