"""The records that a session yields; `--json` prints the same records, one per line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

Finish = Literal["stop", "control", "length", "interrupt", "context", "read"]
"""Why a turn ended. In the order of the names: an end token, a control token that does not belong
in a reply (it is neither shown nor held), the length limit, Ctrl-C, a full context, or `read`: the
turn was read, not generated."""


@dataclass(frozen=True)
class TokenRow:
    """One token of the ledger.

    Attributes:
        position: index in the stream, from 0.
        surprisal: in nats; null for the first token of the stream.
        decayed_surprisal: surprisal after the decays so far, in nats.
        score: the policy's score, which ranks the held tokens; null for a policy without
            scores.
        arrival_key: random, uniform in [0, 1).
        flags: names of the token's other properties, such as `sink` and `pinned`.
        attention: attention received so far; null if attention was never counted.
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
        """The number by which tokens are ordered: the score, or, without one, the surprisal."""
        return self.decayed_surprisal if self.score is None else self.score

    @property
    def shown_rank(self) -> float:
        """`rank_key` rounded to nine digits. Without this, rounding errors, which differ between
        processors, could change the order in which tokens of one word are shown."""
        return float(f"{self.rank_key:.9g}")


@dataclass(frozen=True)
class Event:
    """Base of all records; `kind` is "event" in the JSON, or empty for a record not printed."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Reading(Event):
    """Progress of reading a turn, in tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta(Event):
    """New text of the current reply."""

    text: str


@dataclass(frozen=True)
class Started(Event):
    """A session begins: the model and every setting."""

    kind: ClassVar[str] = "session"
    version: str
    model: str
    device: str
    dtype: str
    context_length: int
    profile: dict[str, Any]


@dataclass(frozen=True)
class TurnDone(Event):
    """A turn was read or generated completely, its closing ids included.

    In this turn, `tokens_in` tokens were read, `tokens_out` generated and `evicted` evicted;
    `resident` tokens are held now; `seen` were read since the start. `finish`: why the turn ended.
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
    """Archived tokens at these stream positions are held again, after turn `turn`."""

    kind: ClassVar[str] = "restore"
    turn: int
    positions: tuple[int, ...]
    resident: int
    seen: int
    tokens: tuple[TokenRow, ...] | None = None


@dataclass(frozen=True)
class RecalledTurn:
    """A turn of which `tokens` tokens were restored.

    `words` are those of the new turn that it shares, the rarest first; empty if words were not
    compared.
    """

    turn: int
    tokens: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recalled(Event):
    """Archived tokens at these stream positions were restored for turn `turn` and its reply.

    `scores` are the retriever's weighted scores: how well each token fits the turn. The tokens at
    `released`, restored for the turn before, were evicted first. With scope layer a token may be
    restored in some layers only. `turns` are the turns that they belong to, in order. `seconds` is
    the time that all this took, the search included.
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
    """A setting changed; `restored` is the number of archived tokens that are held again."""

    kind: ClassVar[str] = "switch"
    what: str
    old: Any
    new: Any
    restored: int
    resident: int


@dataclass(frozen=True)
class Pinned(Event):
    """Tokens were pinned or unpinned; `tokens` is their number."""

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
    """The turn of index `turn` and all later ones were undone; `text` is what the user had said."""

    kind: ClassVar[str] = "undo"
    turn: int
    text: str
    resident: int
    seen: int


@dataclass(frozen=True)
class Notice(Event):
    """Something the user should know."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Ended(Event):
    """A session ends; the event has the seconds that reading and generating took."""

    kind: ClassVar[str] = "end"
    turns: int
    seen: int
    resident: int
    tokens_out: int
    seconds_prefill: float
    seconds_decode: float


_RENAMED = {"old": "from", "new": "to"}


def to_json(event: Event) -> dict[str, Any]:
    """The record as a JSON object; its field `tokens` is left out if it is None."""
    out: dict[str, Any] = {"event": event.kind}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "tokens" and value is None:
            continue
        if field.name in ("tokens", "turns") and isinstance(value, tuple):
            value = [{f.name: getattr(row, f.name) for f in fields(row)} for row in value]
        out[_RENAMED.get(field.name, field.name)] = value
    return out
