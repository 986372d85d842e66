"""How a model was trained to gather a sequence in its last token (Anchor-based LLMs).

A model's config says so, under `sirchat_anchors`: which tokens are anchors, and where they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from sirchat.errors import ModelError
from sirchat.text.detokenizer import SentenceEnds

Variant = Literal["ac", "ep"]
"""`ac`: a token of its own is the anchor. `ep`: a token that ends a sentence is."""

Per = Literal["sentence", "round", "tokens", "random"]
"""Where a token of its own stands: behind each sentence; behind each reply and system prompt, which
is where a demonstration ends; behind every 10 tokens of a text; behind a token with probability 0.1
(section 7.1).
"""

ANCHOR = "<AC>"
"""The anchor token's text, as in the paper."""

_KEY = "sirchat_anchors"


@dataclass(frozen=True)
class Anchors:
    """What a model's anchors are.

    Attributes:
        variant: see `Variant`.
        per: see `Per`; under `ep` always `sentence`.
        token_id: the anchor's id under `ac`.
        sinks: first tokens of a text that everything saw in training.
    """

    variant: Variant
    per: Per = "sentence"
    token_id: int | None = None
    sinks: int = 1

    def write(self, config: Any) -> None:
        """Note it in a model's config."""
        setattr(config, _KEY, asdict(self))


def remove(config: Any) -> None:
    """Let a model's config tell of no anchors."""
    if hasattr(config, _KEY):
        delattr(config, _KEY)


def anchors_of(config: Any) -> Anchors | None:
    """What a model's config tells of its anchors; None for a model that was not trained so.

    Raises ModelError for an entry that makes no sense.
    """
    entry = getattr(config, _KEY, None)
    if entry is None:
        return None
    known = isinstance(entry, dict) and entry.keys() == asdict(Anchors("ep")).keys()
    if not known or entry["variant"] not in get_args(Variant) or entry["per"] not in get_args(Per):
        raise ModelError(f"the model's config has {_KEY} {entry!r}, which makes no sense")
    if entry["variant"] == "ac" and not isinstance(entry["token_id"], int):
        raise ModelError(f"the model's config has no token_id in {_KEY}")
    return Anchors(
        cast("Variant", entry["variant"]),
        cast("Per", entry["per"]),
        entry["token_id"],
        int(entry["sinks"]),
    )


def ends_sequence(tokenizer: Any, anchors: Anchors | None) -> Callable[[int], bool]:
    """Tells, id by id, whether it is an anchor: the model's own, or the end of a sentence."""
    if anchors is not None and anchors.variant == "ac":
        return lambda token_id: token_id == anchors.token_id
    return SentenceEnds(tokenizer)
