"""The tokens of a reply's reasoning, which some models write between `<think>` tags."""

from __future__ import annotations

import re

import numpy as np

from sirchat.chat.snapshot import Positions, Texts
from sirchat.memory.ledger import Ledger, Role
from sirchat.text.detokenizer import tokens_matching

_THOUGHT = re.compile(r"(?:<think>|\A(?!.*?<think>.*?</think>)).*?</think>", re.DOTALL)
"""Tags included. Some templates open the first tag themselves, so that a reply only closes it."""


def reasoning(ledger: Ledger, texts: Texts, turn: int) -> Positions:
    """Stream positions [k], ascending, of the reasoning in a reply; of none that is unfinished."""
    in_turn = ledger.column("turn") == turn
    said = np.flatnonzero(in_turn & (ledger.column("role") == Role.ASSISTANT))
    at = said.tolist()
    pieces = texts(ledger.column("token_id")[said].tolist(), at)
    return said[tokens_matching(_THOUGHT, pieces)]
