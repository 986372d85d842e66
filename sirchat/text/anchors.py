"""Anchor tokens: a model's settings for anchors, and the insertion of anchors into a text.

A model trained for anchors stores the content of each sentence or round in the anchor at its end
(Pang et al. 2024, Anchor-based LLMs, arXiv:2402.07616). The entry `sirchat_anchors` in the model's
config says which tokens are anchors and where anchors are inserted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Literal, cast, get_args

from sirchat.errors import ModelError, UsageError
from sirchat.text.detokenizer import SentenceEnds

Variant = Literal["ac", "ep"]
"""`ac`: the anchor is an added token. `ep`: each token that ends a sentence is an anchor."""

Per = Literal["sentence", "round", "tokens", "random"]
"""Where the added anchor token is inserted.

`sentence`: after each sentence. `round`: after each reply and each system prompt (which may contain
few-shot examples). `tokens`: after every 10 tokens of a text. `random`: after each token with
probability 0.1 (section 7.1 of the paper).
"""

ANCHOR = "<AC>"
"""The anchor token's text, as in the paper."""

_KEY = "sirchat_anchors"


@dataclass(frozen=True)
class Anchors:
    """The settings of a model for anchors (tokens that store the content of the text before them).

    Attributes:
        variant: `ac`: the anchor is an added token; `ep`: tokens that end a sentence are anchors.
        per: where the added token is inserted: see `Per`; always `sentence` if `variant` is `ep`.
        token_id: id of the added anchor token; None if `variant` is `ep`.
        sinks: number of tokens at a text's start that all later tokens attended to in training.
    """

    variant: Variant
    per: Per = "sentence"
    token_id: int | None = None
    sinks: int = 1

    def write(self, config: Any) -> None:
        """Write the settings into `config`, a model's configuration."""
        setattr(config, _KEY, asdict(self))


def remove(config: Any) -> None:
    """Remove the anchor settings from a model's config."""
    if hasattr(config, _KEY):
        delattr(config, _KEY)


def anchors_of(config: Any) -> Anchors | None:
    """The anchor settings in a model's config; None for a model trained without anchors.

    Raises ModelError if the config has an entry for anchors that isn't valid.
    """
    entry = getattr(config, _KEY, None)
    if entry is None:
        return None
    known = isinstance(entry, dict) and entry.keys() == asdict(Anchors("ep")).keys()
    if not known or entry["variant"] not in get_args(Variant) or entry["per"] not in get_args(Per):
        raise ModelError(f"the model's config has an invalid entry {_KEY}: {entry!r}")
    if entry["variant"] == "ac" and not isinstance(entry["token_id"], int):
        raise ModelError(f"the model's config has no valid token_id in {_KEY}")
    return Anchors(
        cast("Variant", entry["variant"]),
        cast("Per", entry["per"]),
        entry["token_id"],
        int(entry["sinks"]),
    )


def ends_sequence(tokenizer: Any, anchors: Anchors | None) -> Callable[[int], bool]:
    """Make a function that returns whether a token id is an anchor.

    The function must be called once for each id of the stream, in order. Anchors are the model's
    added anchor token or, if the model has none, all tokens that end a sentence.
    """
    if anchors is not None and anchors.variant == "ac":
        return lambda token_id: token_id == anchors.token_id
    return SentenceEnds(tokenizer)


def sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences, each with the space before it; joined, they give the whole text.

    `language` is the code of the text's language. Raises UsageError if the optional dependency
    sentencex is not installed.
    """
    try:
        from sentencex import segment
    except ImportError:
        raise UsageError(
            "the sentence splitter is not installed", hint="pip install 'sirchat[anchors]'"
        ) from None
    ends, at = list[int](), 0
    for found in segment(language, text):
        sentence = found.strip()
        at = text.find(sentence, at) + len(sentence) if sentence in text[at:] else at
        if sentence and at not in ends:
            ends.append(at)
    if not ends or text[ends[-1] :].strip():
        ends.append(len(text))
    ends[-1] = len(text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


EVERY = 10
"""Number of text tokens between two anchors if `per` is `tokens`."""

CHANCE = 0.1
"""Probability of an anchor after each token if `per` is `random`."""


def with_anchors(text: str, anchors: Anchors, encode: Callable[[str], list[int]]) -> list[int]:
    """The token ids of a text, with anchors inserted where `anchors.per` says.

    If `anchors.per` is `random`, the places depend only on the text: the same text always has its
    anchors at the same places. If `anchors.per` is `round`, or if the model has no added anchor
    token, no anchors are inserted. `encode` turns a text into ids.
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
    """The token ids, with anchors inserted, of a text that is not a chat.

    If `anchors.per` is `round`, anchors are inserted after sentences, because the text has no
    rounds. `encode` turns a text into ids.
    """
    if anchors is None:
        return encode(text)
    per = "sentence" if anchors.per == "round" else anchors.per
    return with_anchors(text, replace(anchors, per=per), encode)


def _insert_after(ids: list[int], anchor: int, is_chosen: Callable[[int], bool]) -> list[int]:
    """A copy of `ids` with `anchor` inserted after each id for which `is_chosen(n)` is true.

    n is the number of the id in `ids`, counted from 1.
    """
    return [
        i
        for count, token_id in enumerate(ids, 1)
        for i in ((token_id, anchor) if is_chosen(count) else (token_id,))
    ]
