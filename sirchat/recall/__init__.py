"""Recall: finds the evicted tokens that a new turn needs, and restores them to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecalledTurn:
    """An earlier turn from which recall restored tokens for a new turn."""

    turn: int  # its index
    tokens: int  # how many of them recall restored
    words: tuple[str, ...] = ()  # that both turns have, rarest first; empty if not compared
    text: str = ""  # of its passage that fits best; empty if not compared
    bits: int = 0  # the fewest, 8 or 4, to which numbers of the tokens were rounded; 0 if exact
    reason: str = ""  # why its passage was found without common words, such as `its meaning`
