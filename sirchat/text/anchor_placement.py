"""Insertion of anchor tokens into a text (Anchor-based LLMs, sections 3.2 and 7.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from sirchat.text.anchors import Anchors
from sirchat.text.sentences import sentences

EVERY = 10
"""Tokens between two anchors, where they are evenly spaced (`per` is `tokens`)."""

CHANCE = 0.1
"""Probability of an anchor after each token, where they are random (`per` is `random`)."""


def with_anchors(text: str, anchors: Anchors, encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a text, with anchors inserted as `anchors.per` says.

    Random anchors depend on the text alone, so the same text always gets the same ones.
    """
    anchor = anchors.token_id
    if anchor is None:
        return encode(text)
    if anchors.per == "sentence":
        return [i for sentence in sentences(text) for i in (*encode(sentence), anchor)]
    ids = encode(text)
    if anchors.per == "tokens":
        return _insert_after(ids, anchor, lambda count: count % EVERY == 0)
    if anchors.per == "random":
        random = Random(text)
        return _insert_after(ids, anchor, lambda count: random.random() < CHANCE)
    return ids


def plain_text_ids(
    text: str, anchors: Anchors | None, encode: Callable[[str], list[int]]
) -> list[int]:
    """The ids of a text outside of a chat. It has no rounds: `round` means sentences here."""
    if anchors is None:
        return encode(text)
    per = "sentence" if anchors.per == "round" else anchors.per
    return with_anchors(text, replace(anchors, per=per), encode)


def _insert_after(ids: list[int], anchor: int, is_chosen: Callable[[int], bool]) -> list[int]:
    """The ids, with an anchor after the first n of them for each n from 1 that is chosen."""
    return [
        i
        for count, token_id in enumerate(ids, 1)
        for i in ((token_id, anchor) if is_chosen(count) else (token_id,))
    ]
