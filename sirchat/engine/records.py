"""What goes into the engine and comes out of it: settings, records, checkpoints, saved state."""

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
from sirchat.memory.retrieval import RecallSettings

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class CacheSettings:
    """The settings of the cache, its policy, its archive and recall.

    Attributes:
        policy: chooses the rows that stay.
        budget: maximum number of rows held.
        sinks: number of first tokens of the stream that always stay.
        decay: factor on surprisal and attention when a round closes; None for the automatic decay.
        archive: maximum number of bytes that the archive may take; 0 for no archive.
        folder: folder for full segments of the archive; None for RAM.
        protect: whether the newest E/2 rows of the current round are protected from eviction; the
            policy decides about E rows (see `engine.budget`).
        evict: when rows are evicted. "when-full": whenever room is needed. "before-turn": when a
            user turn arrives, for the turn and its whole reply; otherwise only to stay within the
            budget. "between-turns": when a user turn arrives, down to the budget, which the turn
            and its reply may then exceed (SirLLM's Algorithm 1); otherwise only to stay within the
            model's context length.
        in_stream: whether a key's position is its place in the stream, which can then be no longer
            than the model's context; otherwise it is the key's slot in the cache.
        recall: how archived rows are restored for a turn; None for no recall.
        count_attention: whether attention is counted even if the policy does not use it.
    """

    policy: Policy
    budget: int
    sinks: int = 4
    decay: float | None = 1.0
    archive: int = 0
    folder: Path | None = None
    protect: bool = True
    evict: Literal["when-full", "before-turn", "between-turns"] = "when-full"
    in_stream: bool = False
    recall: RecallSettings | None = None
    count_attention: bool = False

    @property
    def attention_stats(self) -> AttentionStatsConfig | None:
        """Which attention is counted; None for none."""
        default = AttentionStatsConfig() if self.count_attention else None
        return self.policy.attention_stats or default


@dataclass(frozen=True)
class TurnRef:
    """Numbers of the turn and the round that ids belong to."""

    turn: int
    round: int


@dataclass(frozen=True)
class ReadProgress:
    """`done` of `total` ids have been read."""

    done: int
    total: int


@dataclass(frozen=True)
class EvictedRows:
    """Rows at these stream positions were evicted; `resident` rows stay; `seen` tokens are read."""

    positions: Positions
    resident: int
    seen: int


@dataclass(frozen=True)
class RestoredRows:
    """Archived rows at these stream positions are held again; other fields as in `EvictedRows`."""

    positions: Positions
    resident: int
    seen: int


@dataclass(frozen=True)
class GeneratedToken:
    """One generated token, already in the cache; surprisal in nats, before temperature."""

    id: int
    position: int
    surprisal: float


@dataclass(frozen=True)
class Stopped:
    """Why generation ended: a stop id (which is not in the cache), the length, or an interrupt."""

    reason: Literal["stop", "length", "interrupt"]
    stop_id: int | None = None


@dataclass(frozen=True)
class ContinuationScore:
    """How likely some ids are as the next tokens.

    Attributes:
        ids: at least one.
        log_probabilities: natural logarithms, one for each id.
        greedy: whether each id is the most likely one at its place.
    """

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    greedy: bool


@dataclass(frozen=True)
class SearchResult:
    """Archived candidates at `positions` [n], ascending, and their scores [n].

    `layers` has each layer's scores [layers, n] if the recall scope is `layer`; else None.
    """

    positions: Positions
    scores: Tensor
    layers: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """Which rows the cache holds.

    Attributes:
        held: stream positions [n], ascending.
        recalled: the positions among `held` that are in the reserve for recall.
        layers: for each layer, the positions of its own recalled rows; empty unless the recall
            scope is `layer`.
    """

    held: Positions
    recalled: Positions
    layers: tuple[Positions, ...] = ()


@dataclass(frozen=True)
class EngineCheckpoint:
    """The engine's state at the beginning of a turn, for undo, with the carried logits [V]."""

    cache: CacheCheckpoint
    logits: Tensor | None
    round: int
    selection: Selection


@dataclass(frozen=True)
class EngineState:
    """All that a saved conversation needs to continue, except keys and values.

    Attributes:
        rows: the ledger's rows [seen], as `memory.ledger.ROW`.
        held: stream positions [n] of the held rows, ascending.
        log_decay, unknown_surprisal: as in the ledger.
        logits: raw logits for the next token, float32 [V].
        round: number of user turns so far.
        recalled: positions among `held` that were recalled for the last round.
    """

    rows: NDArray[np.void]
    held: Positions
    log_decay: float
    unknown_surprisal: float
    logits: NDArray[np.float32] | None
    round: int
    recalled: Positions
