"""Where a model's own anchors stand in a text (Anchor-based LLMs, sections 3.2 and 7.1)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sirchat.text.anchors import Anchors
from sirchat.text.sentences import sentences

EVERY = 10
"""Tokens from one anchor to the next, where they stand at even distances."""

CHANCE = 0.1
"""How likely an anchor is behind a token, where lots are drawn."""


def with_anchors(text: str, anchors: Anchors, encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a text, with the anchors that belong inside it or behind its end.

    Lots are the same for the same text.
    """
    anchor = anchors.token_id
    if anchor is None:
        return encode(text)
    if anchors.per == "sentence":
        return [i for sentence in sentences(text) for i in (*encode(sentence), anchor)]
    ids = encode(text)
    if anchors.per == "tokens":
        return _behind(ids, anchor, lambda at: at % EVERY == 0)
    if anchors.per == "random":
        lots = Random(text)
        return _behind(ids, anchor, lambda at: lots.random() < CHANCE)
    return ids


def _behind(ids: list[int], anchor: int, stands: Callable[[int], bool]) -> list[int]:
    """The ids, with an anchor behind each number of them, from 1, that `stands` chooses."""
    return [i for at, one in enumerate(ids, 1) for i in ((one, anchor) if stands(at) else (one,))]
