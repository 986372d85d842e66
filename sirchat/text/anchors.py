"""Anchor settings of a model that was trained to compress a sequence into its last token.

See Anchor-based LLMs (AnLLM). They are an entry `sirchat_anchors` in the model's config, which says
which tokens are anchors and where they are inserted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from sirchat.errors import ModelError
from sirchat.text.detokenizer import SentenceEnds

Variant = Literal["ac", "ep"]
"""`ac`: the anchor is an added token. `ep`: each token that ends a sentence is an anchor."""

Per = Literal["sentence", "round", "tokens", "random"]
"""Where the added token is inserted.

After each sentence; after each reply and system prompt (where a demonstration ends); after every 10
tokens of a text; after each token with probability 0.1 (section 7.1).
"""

ANCHOR = "<AC>"
"""The anchor token's text, as in the paper."""

_KEY = "sirchat_anchors"


@dataclass(frozen=True)
class Anchors:
    """The anchor settings of a model.

    Attributes:
        variant: see `Variant`.
        per: see `Per`; under `ep` always `sentence`.
        token_id: id of the added anchor token; None under `ep`.
        sinks: number of first tokens of a text that all tokens attended to in training.
    """

    variant: Variant
    per: Per = "sentence"
    token_id: int | None = None
    sinks: int = 1

    def write(self, config: Any) -> None:
        """Write the settings into a model's config."""
        setattr(config, _KEY, asdict(self))


def remove(config: Any) -> None:
    """Remove the anchor settings from a model's config."""
    if hasattr(config, _KEY):
        delattr(config, _KEY)


def anchors_of(config: Any) -> Anchors | None:
    """The anchor settings in a model's config; None for a model trained without anchors.

    Raises ModelError for an entry that isn't valid.
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
    """A function that says of each id of a stream whether it is an anchor.

    That is the model's added token, or, without one, a token that ends a sentence.
    """
    if anchors is not None and anchors.variant == "ac":
        return lambda token_id: token_id == anchors.token_id
    return SentenceEnds(tokenizer)
