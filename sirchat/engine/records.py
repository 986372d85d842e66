"""What the engine takes and gives: its settings, what happens while it works, what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStatsConfig
from sirchat.memory.key_value_store import CacheCheckpoint
from sirchat.memory.policies.base import Policy
from sirchat.memory.recall import RecallSettings


@dataclass(frozen=True)
class CacheSettings:
    """The settings of what is remembered.

    Attributes:
        policy: chooses the rows that stay.
        budget: rows held at most.
        sinks: first tokens of the stream that always stay.
        decay: factor on every score when a round closes; None goes by what a round tells.
        archive: bytes that what left the cache may take, so that it can come back; 0 for none.
        folder: where full parts of the archive go; None for RAM.
        protect: whether the newest E/2 rows of the current round stay whatever the policy says.
        evict: "room" makes room whenever it is needed; "turn" when a user turn arrives, for it and
            its whole reply (SirLLM's Algorithm 1), else only to stay within the budget.
        in_stream: keys stand where they stand in the stream, which then ends with the model's
            context; else close together in the cache.
        recall: how archived rows come back for a turn; None for not at all. Its n rows are a
            reserve of the budget's, which the policy does without.
        counts: whether attention is counted though the policy does not look at it.
    """

    policy: Policy
    budget: int
    sinks: int = 4
    decay: float | None = 1.0
    archive: int = 0
    folder: Path | None = None
    protect: bool = True
    evict: Literal["room", "turn"] = "room"
    in_stream: bool = False
    recall: RecallSettings | None = None
    counts: bool = False

    @property
    def counting(self) -> AttentionStatsConfig | None:
        """What is counted of the attention that rows get; None for nothing."""
        return self.policy.counting or (AttentionStatsConfig() if self.counts else None)


@dataclass(frozen=True)
class Read:
    """Progress of reading: `done` of `total` ids are in the cache."""

    done: int
    total: int


@dataclass(frozen=True)
class EvictedRows:
    """Rows at these stream positions left the cache; `resident` stay, of `seen` ever read."""

    positions: NDArray[np.int64]
    resident: int
    seen: int


@dataclass(frozen=True)
class RestoredRows:
    """Rows at these stream positions came back; `resident` are held now, of `seen` ever read."""

    positions: NDArray[np.int64]
    resident: int
    seen: int


@dataclass(frozen=True)
class SearchResult:
    """What a search found: the candidates at `positions` [n], ascending, and their scores [n].

    `layers` has the scores of each layer [layers, n] where each makes a choice of its own.
    """

    positions: NDArray[np.int64]
    scores: Tensor
    layers: Tensor | None = None


@dataclass(frozen=True)
class Generated:
    """One generated token, already in the cache; surprisal in nats, before temperature."""

    id: int
    position: int
    surprisal: float


@dataclass(frozen=True)
class Stopped:
    """Why generation ended: a stop id (which is not in the cache), the length, or an interrupt."""

    reason: Literal["stop", "length", "interrupt"]


@dataclass(frozen=True)
class ContinuationScore:
    """How likely `ids` would be, were they to come next.

    Attributes:
        ids: not empty.
        log_probabilities: natural logarithms, one for each id.
        greedy: whether each would be the likeliest.
    """

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    greedy: bool


@dataclass(frozen=True)
class TurnRef:
    """Where in the conversation ids stand."""

    turn: int
    round: int


@dataclass(frozen=True)
class Selection:
    """What the cache holds.

    Attributes:
        held: stream positions [n], ascending.
        recalled: those of them that are in the reserve.
        layers: for each layer, the positions of its own in the reserve; empty without any.
    """

    held: NDArray[np.int64]
    recalled: NDArray[np.int64]
    layers: tuple[NDArray[np.int64], ...] = ()


@dataclass(frozen=True)
class EngineCheckpoint:
    """A moment of a conversation; `logits` [V] foretell the token that came next."""

    checkpoint: CacheCheckpoint
    logits: Tensor | None
    round: int
    choice: Selection


@dataclass(frozen=True)
class EngineState:
    """A conversation's ledger and what else the next token depends on, but keys and values.

    Attributes:
        rows: the ledger's rows [seen], as `memory.ledger.ROW`.
        held: stream positions [n] of the held rows, ascending.
        log_decay, unknown_surprisal: of the ledger.
        logits: raw, float32 [V], for the token to come.
        round: user turns so far.
        recalled: positions among `held` that came back for the last round.
    """

    rows: NDArray[np.void]
    held: NDArray[np.int64]
    log_decay: float
    unknown_surprisal: float
    logits: NDArray[np.float32] | None
    round: int
    recalled: NDArray[np.int64]
