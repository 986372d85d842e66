"""The records that a session yields; `--json` prints the same records, one per line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from sirchat.engine.types import ChosenToken

Finish = Literal["stop", "control", "length", "interrupt", "context", "read"]
"""Why a turn ended.

`stop`: the model generated an end token. `control`: it generated a control token that does not
belong in a reply, and is neither shown nor held. `length`: the reply has `max_new_tokens` tokens.
`interrupt`: Ctrl-C. `context`: the model's context is full. `read`: the turn was not generated.
"""


@dataclass(frozen=True)
class TokenRow:
    """One token of the conversation; it may be in the cache or evicted.

    Attributes:
        position: index in the stream of all tokens, from 0.
        turn: index of the token's turn.
        surprisal: -log p(token), in nats; null for the first token of the stream.
        decayed_surprisal: the surprisal times the decay factor of each round that has ended since
            the token was read, in nats.
        score: the policy's score; tokens with low scores are evicted first. Null for a policy
            without scores.
        arrival_key: a random number drawn for this token, uniform in [0, 1).
        flags: names of the token's other properties, such as `sink` and `pinned`.
        attention: sum of the attention weights that the token has received, reduced by the decay;
            null if attention was never counted.
    """

    position: int
    id: int
    text: str
    turn: int
    role: str
    surprisal: float | None
    decayed_surprisal: float
    score: float | None
    arrival_key: float
    flags: tuple[str, ...]
    attention: float | None = None

    @property
    def rank_key(self) -> float:
        """The number by which tokens are ordered: `score`; if null, `decayed_surprisal`."""
        return self.decayed_surprisal if self.score is None else self.score

    @property
    def shown_rank(self) -> float:
        """`rank_key`, rounded to nine digits.

        Rounding errors differ between processors. Without rounding, they could change the order in
        which tokens of one word are shown.
        """
        return float(f"{self.rank_key:.9g}")


@dataclass(frozen=True)
class Event:
    """Base class of all events.

    `kind` is the value of the field "event" in the JSON. If `kind` is empty, `--json` prints no
    line for the event.
    """

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Reading(Event):
    """Progress of reading a turn: `done` of its `total` tokens are read."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta(Event):
    """New text of the current reply, to be shown after the text of the earlier deltas."""

    text: str


@dataclass(frozen=True)
class Choosing(Event):
    """The next token of the reply is sampled, but the model has not read it yet.

    A session yields this event only if `Session.together` is true: then the caller can let the
    model read the tokens of several sessions in one batch.
    """

    token: ChosenToken


@dataclass(frozen=True)
class Started(Event):
    """A session begins; the event names the model and every setting."""

    kind: ClassVar[str] = "session"
    version: str
    model: str
    device: str
    dtype: str
    context_length: int
    profile: dict[str, Any]


@dataclass(frozen=True)
class TurnDone(Event):
    """A turn was read or generated completely, up to the end tokens of the chat template.

    During this turn, `tokens_in` tokens were read, `tokens_out` tokens were generated, and
    `evicted` tokens were evicted. Now `resident` tokens are in the cache; recall restored
    `recalled` of them for this round. Since the chat began, `seen` tokens were read or generated.
    `finish` is the reason why the turn ended.
    """

    kind: ClassVar[str] = "turn"
    index: int
    role: str
    text: str
    tokens_in: int
    tokens_out: int
    resident: int
    seen: int
    evicted: int
    recalled: int
    seconds_prefill: float
    seconds_decode: float
    finish: Finish
    tokens: tuple[TokenRow, ...] | None = None


@dataclass(frozen=True)
class Evicted(Event):
    """Tokens at these stream positions were evicted while turn `turn` was read or generated."""

    kind: ClassVar[str] = "evict"
    turn: int
    positions: tuple[int, ...]
    resident: int
    seen: int
    tokens: tuple[TokenRow, ...] | None = None


@dataclass(frozen=True)
class Restored(Event):
    """Archived tokens at these stream positions were restored to the cache after turn `turn`."""

    kind: ClassVar[str] = "restore"
    turn: int
    positions: tuple[int, ...]
    resident: int
    seen: int
    tokens: tuple[TokenRow, ...] | None = None


@dataclass(frozen=True)
class RecalledTurn:
    """An earlier turn of which recall restored tokens, for a new turn.

    Attributes:
        turn: index of the earlier turn.
        tokens: how many of its tokens recall restored.
        words: words that the earlier and the new turn have in common, the rarest first; empty if
            recall did not compare words.
    """

    turn: int
    tokens: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recalled(Event):
    """Archived tokens at these stream positions were restored for turn `turn` and its reply.

    `scores` has one number for each position: how well the token fits the turn. `released` are the
    positions of the tokens that recall had restored for the turn before. `turns` are the turns of
    the restored tokens, in order. `seconds` is the time for searching and restoring the tokens. If
    the setting `recall_scope` is `layer`, some layers may restore a token and others not.
    """

    kind: ClassVar[str] = "recall"
    turn: int
    retriever: str
    positions: tuple[int, ...]
    scores: tuple[float, ...]
    released: tuple[int, ...]
    turns: tuple[RecalledTurn, ...]
    seconds: float
    resident: int
    seen: int
    tokens: tuple[TokenRow, ...] | None = None


@dataclass(frozen=True)
class Switched(Event):
    """The setting named `what` changed; the change restored `restored` archived tokens."""

    kind: ClassVar[str] = "switch"
    what: str
    old: Any
    new: Any
    restored: int
    resident: int


@dataclass(frozen=True)
class Pinned(Event):
    """The user pinned or unpinned tokens; `tokens` is how many.

    `pinned` is true if they were pinned, and false if they were unpinned.
    """

    kind: ClassVar[str] = "pin"
    tokens: int
    pinned: bool
    resident: int


@dataclass(frozen=True)
class Erased(Event):
    """Tokens were erased from cache, archive and saved text; `tokens` is their number."""

    kind: ClassVar[str] = "erase"
    tokens: int
    resident: int


@dataclass(frozen=True)
class Undone(Event):
    """The user turn with index `turn` and all later turns were undone; `text` is its message."""

    kind: ClassVar[str] = "undo"
    turn: int
    text: str
    resident: int
    seen: int


@dataclass(frozen=True)
class Notice(Event):
    """A message to the user, such as that a setting has no effect."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Ended(Event):
    """A session ends; the event has the totals of its turns, tokens and seconds.

    `seconds_prefill` is the time for reading, `seconds_decode` the time for generating.
    """

    kind: ClassVar[str] = "end"
    turns: int
    seen: int
    resident: int
    tokens_out: int
    seconds_prefill: float
    seconds_decode: float


_RENAMED = {"old": "from", "new": "to"}


def to_json(event: Event) -> dict[str, Any]:
    """The event as a dictionary that can be written as JSON.

    A field `tokens` that is None is left out.
    """
    out: dict[str, Any] = {"event": event.kind}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "tokens" and value is None:
            continue
        if field.name in ("tokens", "turns") and isinstance(value, tuple):
            value = [{f.name: getattr(row, f.name) for f in fields(row)} for row in value]
        out[_RENAMED.get(field.name, field.name)] = value
    return out
