"""The records that a session yields; `--json` prints the same records, one per line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sirchat.recall import RecalledTurn

if TYPE_CHECKING:
    from sirchat.text.reply_parts import Part

# Why a turn ended. `stop`: the model generated an end token. `control`: it generated a control
# token that does not belong in a reply, and is neither shown nor held. `length`: the reply has
# `max_new_tokens` tokens. `loop`: it only repeated itself. `interrupt`: Ctrl-C. `context`: the
# model's context is full. `read`: the turn was not generated.
Finish = Literal["stop", "control", "length", "loop", "interrupt", "context", "read"]

_JSON_NAMES = {"old": "from", "new": "to"}  # fields, in the JSON


@dataclass(frozen=True)
class TokenRow:
    """One token of the conversation, held or evicted."""

    position: int  # in the stream of all tokens, from 0
    id: int
    text: str
    turn: int  # index of its turn
    role: str
    surprisal: float | None  # -log p(token), in nats; null for the first token of the stream
    decayed_surprisal: float  # times the decay factor of each round that has ended since, in nats
    score: float | None  # the policy's; low scores are evicted first; null: it has no scores
    arrival_key: float  # a random number drawn for this token, uniform in [0, 1)
    flags: tuple[str, ...]  # names of its other properties, such as `sink` and `pinned`
    attention: float | None = None  # received so far, less the decay; null: never counted

    @property
    def rank_key(self) -> float:
        """The number by which tokens are ordered: `score`; if null, `decayed_surprisal`."""
        return self.decayed_surprisal if self.score is None else self.score

    @property
    def shown_rank(self) -> float:
        # Rounding errors differ between processors, and would change the order of what is shown.
        return float(f"{self.rank_key:.9g}")


@dataclass(frozen=True)
class Event:
    kind: ClassVar[str] = ""  # the field "event" in the JSON; if empty, `--json` prints no line


@dataclass(frozen=True)
class Reading(Event):
    """Progress of reading a turn: `done` of its `total` tokens are read."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta(Event):
    """New text of the current reply, to be shown after the text of the earlier deltas."""

    text: str
    part: Part = "answer"
    end: int = 0  # characters of the reply up to the end of this text, with the marks of parts


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
    """A turn was read or generated completely, up to the end tokens of the chat template."""

    kind: ClassVar[str] = "turn"
    index: int
    role: str
    text: str  # without reasoning
    tokens_in: int  # read during this turn
    tokens_out: int  # generated during this turn
    resident: int  # in the cache now
    seen: int  # read or generated since the chat began
    evicted: int  # during this turn
    recalled: int  # tokens that recall restored for this round, held while it was read or generated
    seconds_prefill: float
    seconds_decode: float
    finish: Finish
    tokens: tuple[TokenRow, ...] | None = None
    thinking: str = ""  # the reasoning of a reply


@dataclass(frozen=True)
class _Moved(Event):
    turn: int
    positions: tuple[int, ...]
    resident: int
    seen: int
    tokens: tuple[TokenRow, ...] | None = None


@dataclass(frozen=True)
class Evicted(_Moved):
    """Tokens at these stream positions were evicted while turn `turn` was read or generated."""

    kind: ClassVar[str] = "evict"


@dataclass(frozen=True)
class Restored(_Moved):
    """Archived tokens at these stream positions were restored to the cache after turn `turn`."""

    kind: ClassVar[str] = "restore"


@dataclass(frozen=True)
class Recalled(Event):
    """Archived tokens at these stream positions were restored for turn `turn` and its reply."""

    kind: ClassVar[str] = "recall"
    turn: int
    retriever: str
    positions: tuple[int, ...]  # of what was restored
    scores: tuple[float, ...]  # of each position: how well the token fits the turn
    released: tuple[int, ...]  # recalled for the turn before; they left when it was answered
    turns: tuple[RecalledTurn, ...]  # of the restored tokens, in order
    seconds: float  # for searching and restoring
    resident: int
    seen: int
    tokens: tuple[TokenRow, ...] | None = None
    # All else but sinks, pins and the newest round has stepped aside for the reply.
    focused: bool = False


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
    """So many `tokens` were pinned, or unpinned if `pinned` is false: by the user, or as a rule."""

    kind: ClassVar[str] = "pin"
    tokens: int
    pinned: bool
    resident: int


@dataclass(frozen=True)
class Erased(Event):
    """`tokens` tokens were erased from cache, archive and saved text."""

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
class Called(Event):
    """A tool is called with `arguments`, as the model asked in turn `turn`."""

    kind: ClassVar[str] = "call"
    turn: int
    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Returned(Event):
    """A tool has returned `text`, or an error; the model reads it as the next turn."""

    kind: ClassVar[str] = "result"
    id: str
    name: str
    text: str
    is_error: bool
    seconds: float


@dataclass(frozen=True)
class Ended(Event):
    """A session ends; the event has the totals of its turns, tokens and seconds."""

    kind: ClassVar[str] = "end"
    turns: int
    seen: int
    resident: int
    tokens_out: int
    seconds_prefill: float
    seconds_decode: float


def to_json(event: Event) -> dict[str, Any]:
    """The event as a dictionary for JSON, without `tokens` if None and `thinking` if empty."""
    out: dict[str, Any] = {"event": event.kind}
    for field in fields(event):
        value = getattr(event, field.name)
        if (field.name == "tokens" and value is None) or (field.name == "thinking" and not value):
            continue
        if field.name in ("tokens", "turns") and isinstance(value, tuple):
            value = [{f.name: getattr(row, f.name) for f in fields(row)} for row in value]
        out[_JSON_NAMES.get(field.name, field.name)] = value
    return out
