"""Types of the engine's arguments and results: settings, records, checkpoints, saved state.

The engine reads and generates token ids within a budget of cache rows, one row per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.cache import BoundedCache
from sirchat.memory.cache_layers import CacheState
from sirchat.memory.key_value_store import CacheCheckpoint
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import Policy


@dataclass(frozen=True)
class RecallSettings:
    """Settings of recall: how archived tokens are chosen and restored for a turn.

    Attributes:
        retriever: name of the retriever that scores the tokens.
        weight: `surprisal` multiplies a score, less the lowest, by the token's surprisal in nats.
        n: most tokens to restore, for which slots are reserved; None: it depends on the budget.
        soft: whether scores are evened out (see `recall.search.softened`).
        span: number of neighbours, on each side, that are restored with a token.
        scope: `token` restores the same tokens in all layers, `layer` each layer's own.
        query: whether tokens are compared with the new turn or the newest tokens before it.
    """

    retriever: str
    weight: Literal["none", "surprisal"] = "none"
    n: int | None = None
    soft: bool = False
    span: int = 0
    scope: Literal["token", "layer"] = "token"
    query: Literal["turn", "recent"] = "turn"


@dataclass(frozen=True)
class CacheSettings:
    """The settings of the KV cache, its eviction policy, its archive and recall.

    Attributes:
        policy: chooses the tokens (rows) that stay in the cache.
        budget: maximum number of rows in the cache.
        sinks: number of first tokens of the stream that always stay.
        decay: factor that multiplies surprisal and attention at the end of each round; None for the
            automatic decay.
        archive: maximum size of the archive in bytes; 0 for no archive.
        folder: folder of the archive's files; None to keep the archive in RAM.
        protect: whether the newest E/2 rows of the current round are protected from eviction; E is
            the number of rows that the policy decides about (see `engine.budget`).
        evict: when rows are evicted. "when-full": whenever room is needed. "before-turn": when a
            user turn arrives, so many rows that the turn and its whole reply fit in the budget.
            "between-turns": when a user turn arrives, the rows above the budget; the turn and its
            reply may then exceed the budget, up to the model's context length (SirLLM's
            Algorithm 1).
        absolute_positions: True: a token's rotary position is its stream position, so the stream
            can't be longer than the model's context. False: it is the token's slot in the cache.
        recall: how archived rows are restored for a turn; None for no recall.
        count_attention: whether attention is recorded even if the policy does not use it.
    """

    policy: Policy
    budget: int
    sinks: int = 4
    decay: float | None = 1.0
    archive: int = 0
    folder: Path | None = None
    protect: bool = True
    evict: Literal["when-full", "before-turn", "between-turns"] = "when-full"
    absolute_positions: bool = False
    recall: RecallSettings | None = None
    count_attention: bool = False

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        """Which attention weights are recorded while the model reads; None to record none."""
        default = AttentionStatsConfig() if self.count_attention else None
        return self.policy.attention_stats or default


@dataclass(frozen=True)
class TurnRef:
    """The numbers of the turn (message) and of the round to which token ids belong."""

    turn: int
    round: int


@dataclass(frozen=True)
class ReadProgress:
    """Record of progress in reading a turn: `done` of its `total` ids have been read."""

    done: int
    total: int


@dataclass(frozen=True)
class EvictedRows:
    """Record of an eviction: the tokens at stream `positions` were evicted from the cache.

    After the eviction, `resident` tokens are in the cache. `seen` is the number of all tokens that
    have been read.
    """

    positions: Positions
    resident: int
    seen: int


@dataclass(frozen=True)
class RestoredRows:
    """Record: the tokens at stream `positions` were restored from the archive to the cache.

    After that, `resident` tokens are in the cache. `seen` is the number of all tokens that have
    been read.
    """

    positions: Positions
    resident: int
    seen: int


@dataclass(frozen=True)
class GeneratedToken:
    """Record of a generated token, which has been read and is in the cache.

    `position` is its stream position. `surprisal` is -log p(token) in nats, from the logits before
    temperature and penalties.
    """

    id: int
    position: int
    surprisal: float


@dataclass(frozen=True)
class PrefillChunk:
    """A chunk of m ids of one turn that are read together, with the role and flags of each id."""

    ids: Sequence[int]
    roles: Sequence[Role]
    flags: Sequence[int]
    turn: TurnRef

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> PrefillChunk:
        """A new chunk of the ids with index `start` to `end` - 1, with their roles and flags."""
        at = slice(start, end)
        return PrefillChunk(self.ids[at], self.roles[at], self.flags[at], self.turn)


@dataclass(frozen=True, eq=False)
class ChosenToken:
    """Record of the next token of a reply, which has been chosen but which the model must read.

    Engine.generate yields the record before it reads the token. The caller may then read the token
    in one forward pass with tokens of other conversations.

    Attributes:
        id: the token's id.
        position: the token's rotary position.
        cache: the conversation's cache, which has room for the token.
        accept: a function to call with the result, if the caller has read the token. Its arguments
            are the logits [1, V] after the token, and the token's score by the model's trained
            scorer.
    """

    id: int
    position: int
    cache: BoundedCache
    accept: Callable[[Tensor, float], None]


@dataclass(frozen=True)
class Stopped:
    """Record of the end of a reply: a stop id, the maximum length, or an interrupt.

    If the model has chosen a stop id, it is in `stop_id`; it has not been read into the cache.
    """

    reason: Literal["stop", "length", "interrupt"]
    stop_id: int | None = None


Generated = GeneratedToken | EvictedRows | ChosenToken | Stopped
"""The records that `Engine.generate` yields while it generates a reply."""


@dataclass(frozen=True)
class ContinuationScore:
    """How likely a list of ids is as the next tokens of the conversation.

    Attributes:
        ids: the ids; at least one.
        log_probabilities: natural logarithm of each id's probability, given the ids before it.
        greedy: whether every id is the one with the highest probability at its place.
    """

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    greedy: bool


@dataclass(frozen=True)
class Selection:
    """Record of the tokens (rows) that the cache holds, or is to hold.

    Attributes:
        held: stream positions [n], ascending, of the rows that all layers hold.
        recalled: those of `held` that were restored by recall for this round.
        layers: for each layer, the positions of the recalled rows that only this layer holds; empty
            unless the setting `recall_scope` is `layer`.
    """

    held: Positions
    recalled: Positions
    layers: tuple[Positions, ...] = ()


@dataclass(frozen=True)
class EngineCheckpoint:
    """The engine's state at the beginning of a turn; `Engine.undo` goes back to it.

    `logits` [V] are the raw logits for the next token.
    """

    cache: CacheCheckpoint
    logits: Tensor | None
    round: int
    selection: Selection


@dataclass(frozen=True)
class EngineState:
    """The engine's state that a saved conversation needs to continue, except keys and values.

    Attributes:
        rows: the ledger's rows [seen], structured as `memory.ledger.ROW`.
        held: stream positions [n] of the rows in the cache, ascending.
        log_decay, unknown_surprisal: the ledger's attributes with these names.
        logits: raw logits for the next token, float32 [V].
        round: number of user turns so far.
        recalled: those of `held` that were recalled for the last round.
        state: the state of recurrent and convolution layers, on their device; empty without such
            layers, or if it was not saved.
    """

    rows: NDArray[np.void]
    held: Positions
    log_decay: float
    unknown_surprisal: float
    logits: NDArray[np.float32] | None
    round: int
    recalled: Positions
    state: CacheState = ()
