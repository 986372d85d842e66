"""Anchor tokens: a model's settings for anchors, and the insertion of anchors into a text.

A model trained for anchors stores the content of each sentence or round in the anchor at its end
(Pang et al. 2024, Anchor-based LLMs, arXiv:2402.07616).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from sirchat.errors import ModelError
from sirchat.text.detokenizer import SENTENCE_END, SentenceEnds

# `ac`: the anchor is an added token. `ep`: each token that ends a sentence is an anchor.
Variant = Literal["ac", "ep"]

# Where the added anchor token is inserted. `round`: after each reply and each system prompt (which
# may contain few-shot examples).
Per = Literal["sentence", "round"]

ANCHOR = "<AC>"  # the anchor token's text, as in the paper
_KEY = "sirchat_anchors"


@dataclass(frozen=True)
class Anchors:
    """A model's settings for anchors; `token_id` is the added token, or None in the variant `ep`.

    In training, all later tokens attended to the first `sinks` tokens of a text.
    """

    variant: Variant
    per: Per = "sentence"
    token_id: int | None = None
    sinks: int = 1

    def write_to_config(self, config: Any) -> None:
        setattr(config, _KEY, asdict(self))


def remove_anchors(config: Any) -> None:
    if hasattr(config, _KEY):
        delattr(config, _KEY)


def anchors_of(config: Any) -> Anchors | None:
    """The settings in a model's config, or None; raises ModelError if they are not valid."""
    entry = getattr(config, _KEY, None)
    if entry is None:
        return None
    try:
        anchors = TypeAdapter(Anchors).validate_python(entry)
    except ValidationError:
        raise ModelError(f"the model's config has an invalid entry {_KEY}: {entry!r}") from None
    if anchors.variant == "ac" and anchors.token_id is None:
        raise ModelError(f"the model's config has no token_id in {_KEY}")
    count = config.get_text_config(decoder=True).vocab_size
    if not 0 <= (anchors.token_id or 0) < count:
        raise ModelError(
            f"the model's config says {_KEY}: token_id {anchors.token_id:,}; "
            f"the model has the ids 0 to {count - 1:,}"
        )
    return anchors


def anchor_detector(tokenizer: Any, anchors: Anchors | None) -> Callable[[int], bool]:
    """Make a function that takes a text's ids in order, and says of each whether it is an anchor.

    In a model without an added anchor token, the tokens that end a sentence are anchors.
    """
    if anchors is not None and anchors.variant == "ac":
        return lambda token_id: token_id == anchors.token_id
    return SentenceEnds(tokenizer)


def sentences(text: str) -> list[str]:
    """Split a text into sentences; each begins with the space before it."""
    ends, read = list[int](), 0
    for match in SENTENCE_END.finditer(text):
        if text[read : match.end()].strip():
            ends.append(match.end())
        read = match.end()
    ends[-1:] = [len(text)]  # the last one has what follows, too
    return [text[start:end] for start, end in pairwise([0, *ends])]


def with_anchors(text: str, anchors: Anchors, encode: Callable[[str], list[int]]) -> list[int]:
    """The token ids of a text, by `encode`, with an anchor after each sentence.

    No anchors are inserted if `per` is `round`, or if the model has no added anchor token.
    """
    anchor = anchors.token_id
    if anchor is None or anchors.per == "round":
        return encode(text)
    return [i for sentence in sentences(text) for i in (*encode(sentence), anchor)]


def plain_text_ids(
    text: str, anchors: Anchors | None, encode: Callable[[str], list[int]]
) -> list[int]:
    """The ids of a text that is not a chat; anchors follow its sentences, as it has no rounds."""
    if anchors is None:
        return encode(text)
    return with_anchors(text, replace(anchors, per="sentence"), encode)
