"""Types of the engine's arguments and results: settings, records, checkpoints, saved state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.key_values import CacheState, Positions
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import Policy


@dataclass(frozen=True)
class RecallSettings:
    """How archived tokens are chosen and restored for a turn."""

    retriever: str  # name of the retriever that scores the tokens
    # `surprisal` multiplies a score, less the lowest, by the token's surprisal in nats.
    weight: Literal["none", "surprisal"] = "none"
    n: int | None = None  # most tokens to restore for a turn; None: it depends on the budget
    # Whether tokens are compared with the new turn or with the newest tokens before it.
    query: Literal["turn", "recent"] = "turn"
    # Most tokens from which a question is answered; 0: all; None: as the model's encoder says.
    focus: int | None = None


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the KV cache, its eviction policy, its archive and recall."""

    policy: Policy
    budget: int  # most tokens in the cache
    sinks: int = 4  # first tokens of the stream, which always stay
    decay: float = 1.0  # multiplies surprisal and attention at the end of each round
    archive: int = 0  # most bytes in the archive; 0 for no archive
    folder: Path | None = None  # of the archive's files; None keeps the archive in RAM
    protect: bool = True  # whether the current round's newest tokens stay
    # When tokens are evicted. when-full: whenever room is needed. before-turn: when a user turn
    # arrives, so many that it and its whole reply fit. between-turns: when a user turn arrives,
    # those above the budget, which the turn and its reply may then exceed (SirLLM's Algorithm 1).
    evict: Literal["when-full", "before-turn", "between-turns"] = "when-full"
    # Whether a token's rotary position is its stream position, so that the stream can't be longer
    # than the model's context; else it is the token's slot in the cache.
    absolute_positions: bool = False
    recall: RecallSettings | None = None
    count_attention: bool = False  # record attention even if the policy does not use it

    @property
    def honoured_sinks(self) -> int:
        """The number of sinks; 0 if the policy ignores them."""
        return self.sinks if self.policy.honours_sinks else 0

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        """Which attention weights are recorded while the model reads; None for none."""
        default = AttentionStatsConfig() if self.count_attention else None
        return self.policy.attention_stats or default


@dataclass(frozen=True)
class TurnRef:
    """The numbers of the turn (message) and of the round to which token ids belong."""

    turn: int
    round: int


@dataclass(frozen=True)
class ReadProgress:
    """Record: `done` of the `total` ids of a turn have been read."""

    done: int
    total: int


class GeneratedToken(NamedTuple):
    """Record of a generated token, which is in the cache."""

    id: int
    position: int  # in the stream
    surprisal: float  # nats, before temperature and penalties


class NewTokens(NamedTuple):
    """Ids [m] of one turn that are read together, with the role and the flags of each."""

    ids: Sequence[int]
    roles: Sequence[Role]
    flags: Sequence[int]
    turn: TurnRef

    def part(self, start: int, end: int) -> NewTokens:
        """The ids with index `start` to `end` - 1, with their roles and flags."""
        indices = slice(start, end)
        return NewTokens(self.ids[indices], self.roles[indices], self.flags[indices], self.turn)


@dataclass(frozen=True)
class Stopped:
    """Record of a reply's end. A stop id that ended the reply is not in the cache."""

    reason: Literal["stop", "length"]
    stop_id: int | None = None


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probability of each of `ids` [m] as the next tokens, given the ids before it."""

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]  # nats
    greedy: bool  # whether every id is the most likely one at its place


@dataclass(frozen=True)
class EngineState:
    """The engine's state that a saved conversation needs to continue, without keys and values."""

    rows: NDArray[np.void]  # the ledger's, all or the newest, structured as `memory.ledger.ROW`
    held: Positions  # [n], ascending
    log_decay: float
    unknown_surprisal: float
    logits: NDArray[np.float32] | None  # [V], raw, for the next token
    round: int
    # Of recurrent and convolution layers, on their device; empty without such layers or if it was
    # not saved.
    state: CacheState = ()
