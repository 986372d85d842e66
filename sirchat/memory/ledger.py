"""The ledger: a table with one row per token of the conversation, in the KV cache or not.

The stream is the sequence of all tokens read or generated. The table is one array that grows by
doubling (40 bytes a token; 16 more if attention is recorded). Held rows are those of the tokens in
the cache: held row number i, in stream order, is in slot i of every layer. Every column except
attention is recorded under any policy, so that the policy can be switched at any moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStats
from sirchat.memory.random_numbers import Purpose, uniform


class Role(IntEnum):
    """Who wrote a token; `TEMPLATE` is for tokens that the chat template put around the text."""

    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TEMPLATE = 3


class Flag(IntFlag):
    """Flags of a token.

    A `PINNED` token is protected from eviction; an `ANCHOR` token ends a sentence or round; the id
    and surprisal of an `ERASED` token were deleted; a `RECALLED` token was restored for this round
    by recall; a `CONTINUES` token belongs to the same word as the token before it; an `EXCLUDED`
    token was evicted and is never restored, because it belongs to an old system prompt or to a
    reply's reasoning.
    """

    PINNED = 1
    ANCHOR = 2
    ERASED = 4
    RECALLED = 8
    CONTINUES = 16
    EXCLUDED = 32


class State(IntEnum):
    """Where a token's keys and values are: in the cache, nowhere (`GONE`), or in the archive."""

    HELD = 0
    GONE = 1
    ARCHIVED = 2


ROW = np.dtype(
    [
        ("token_id", np.int32),
        ("turn", np.int32),
        ("round", np.int32),
        ("surprisal", np.float32),  # nats; NaN for the first token of the stream
        ("birth_decay", np.float64),  # the ledger's log_decay when the token arrived
        ("arrival_key", np.float64),  # uniform in [0, 1)
        ("role", np.int8),
        ("flags", np.uint8),
        ("state", np.int8),
        ("learned_score", np.float32),  # of the model's scorer, a natural log; NaN where unknown
    ],
    align=True,
)


KeyValueStat = Literal["key_norm", "key_similarity", "value_norm", "value_range"]
"""The name of a statistic of a token's key k and value v in one head:

- `key_norm`: the L2 norm |k|;
- `key_similarity`: the cosine between k, rotated as attention reads it, and the mean of k / |k|
  over all tokens that the policy ranks;
- `value_norm`: the L1 norm |v|;
- `value_range`: max(v) - min(v).
"""


@dataclass(frozen=True)
class HeldRows:
    """The n tokens (rows) among which a policy chooses, in stream order: tensors [n] on the CPU.

    These are the tokens in the cache; after a change of settings or pins, archived tokens, too.

    Attributes:
        position: stream positions, ascending.
        token_id, turn, round, role: numbers of each token; `role` is one of `Role`.
        surprisal: -log p(token) in nats. Nothing predicts the first token of the stream, so it has
            the highest surprisal of the tokens read with it.
        log_decay_since: logarithm of the product of the decays since the row was read.
        log_decayed_surprisal: logarithm of the surprisal times these decays.
        attention: attention received so far, if attention is counted; else 0.
        recent_attention: attention received from the newest queries alone, if counted; else 0.
        repeat_attention: highest attention weight received while the row's round was read a second
            time, if a policy asked for that; else 0.
        learned_score: score that the model's scorer predicts, a natural logarithm; NaN for a row
            that was read without a scorer.
        key_norm, key_similarity, value_norm, value_range: statistics of the row's key and value,
            see `KeyValueStat`, if the policy uses them; else 0.
        arrival_key: random, uniform in [0, 1), drawn when the row was read.
        is_pinned, is_anchor, is_sink: masks of the pinned rows, the anchors, and the sinks.
        continues_word: mask of the tokens that belong to the same word as the token before them.
        protected: mask of the rows that must stay: sinks, pins, the current round's newest rows.
        seen: number of tokens ever read.
        seed: seed for the policy's random numbers.
    """

    position: Tensor
    token_id: Tensor
    turn: Tensor
    round: Tensor
    role: Tensor
    surprisal: Tensor
    log_decay_since: Tensor
    log_decayed_surprisal: Tensor
    attention: Tensor
    recent_attention: Tensor
    repeat_attention: Tensor
    learned_score: Tensor
    key_norm: Tensor
    key_similarity: Tensor
    value_norm: Tensor
    value_range: Tensor
    arrival_key: Tensor
    is_pinned: Tensor
    is_anchor: Tensor
    is_sink: Tensor
    continues_word: Tensor
    protected: Tensor
    seen: int
    seed: int

    def __len__(self) -> int:
        return len(self.position)

    def newest(self, count: int) -> Tensor:
        """Mask [n]: which rows are among the last `count` tokens of the conversation."""
        return self.position >= self.seen - count


class Ledger:
    """A table with one row for each token of the conversation, in the cache or evicted.

    Args:
        seed: seed of the arrival keys: one random number in [0, 1) for each token.
        unknown_surprisal: surprisal of the first token, in nats, until `rank_first_token` sets it.

    Attributes:
        attention: statistics of the attention that each row received.
    """

    def __init__(self, seed: int = 0, unknown_surprisal: float = 0.0) -> None:
        self.seed = seed
        self.seen = 0
        self.log_decay = 0.0
        self.unknown_surprisal = unknown_surprisal
        self.attention = AttentionStats()
        self._rows = np.zeros(1024, ROW)
        self._add_arrival_keys(0)
        self._held = np.zeros(1024, np.int64)
        self._held_count = 0
        self._recalled = np.zeros(0, np.int64)
        self._pinned: NDArray[np.int64] | None = None  # None: must be computed again

    @property
    def recalled(self) -> NDArray[np.int64]:
        """Stream positions, ascending, of the tokens that recall has restored for this round."""
        return self._recalled

    @property
    def held_count(self) -> int:
        """Number of tokens in the KV cache."""
        return self._held_count

    @property
    def held_positions(self) -> NDArray[np.int64]:
        """Stream positions [n] of the tokens in the KV cache, ascending (a view)."""
        return self._held[: self._held_count]

    def held_of_turn(self, turn: int) -> int:
        """Number of tokens of the turn number `turn` that are in the cache."""
        return int(np.count_nonzero(self.column("turn")[self.held_positions] == turn))

    def column(self, name: str) -> NDArray[Any]:
        """The column `name` of the table, one entry per token [seen]: a read-only view."""
        column = self._rows[name][: self.seen]
        column.flags.writeable = False
        return column

    @property
    def pinned_positions(self) -> NDArray[np.int64]:
        """Stream positions, ascending, of all pinned tokens, in the cache or not."""
        if self._pinned is None:
            self._pinned = np.flatnonzero(self.column("flags") & Flag.PINNED)
            self._pinned.flags.writeable = False
        return self._pinned

    def append(
        self,
        ids: list[int],
        surprisal: list[float],
        *,
        turn: int,
        round: int,
        roles: list[int],
        flags: list[int],
        learned_scores: list[float] | None = None,
    ) -> None:
        """Add one row for each of the ids that the model has just read into the cache.

        `surprisal` is in nats. `learned_scores` are the predictions of the model's trained scorer;
        None without a scorer.
        """
        learned = learned_scores or [math.nan] * len(ids)
        start, end = self.seen, self.seen + len(ids)
        self._grow(end, self._held_count + len(ids))
        rows = self._rows
        if len(ids) == 1:  # one assignment: this runs for every generated token
            key, decay = rows["arrival_key"][start], self.log_decay
            about = (roles[0], flags[0], 0, learned[0])
            rows[start] = (ids[0], turn, round, surprisal[0], decay, key, *about)
            self._held[self._held_count] = start
        else:
            new = rows[start:end]
            new["token_id"], new["turn"], new["round"] = ids, turn, round
            new["surprisal"], new["birth_decay"] = surprisal, self.log_decay
            new["role"], new["flags"], new["learned_score"] = roles, flags, learned
            self._held[self._held_count : self._held_count + len(ids)] = range(start, end)
        self._held_count += len(ids)
        self.seen = end
        if any(flag & int(Flag.PINNED) for flag in flags):
            self._pinned = None

    def rank_first_token(self, count: int) -> None:
        """Set the first token's surprisal to the highest surprisal of the first `count` tokens."""
        if count > 1:
            self.unknown_surprisal = float(self._rows["surprisal"][1:count].max())

    def keep(self, rows: Tensor, state: State = State.GONE) -> NDArray[np.int64]:
        """Record an eviction: only the cache's rows numbered `rows` [k] stay in the cache.

        Evicted rows get the state `state`; returns the stream positions of the evicted rows.
        """
        return self.hold(self.held_positions[rows.numpy()], state)[0]

    def hold(
        self, positions: NDArray[np.int64], state: State
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Record that the cache now holds exactly the rows at stream `positions` [n], ascending.

        Rows that thereby leave the cache get the state `state`. Returns the positions of these
        evicted rows, and the positions of the restored rows, which are new in the cache.
        """
        before = self.held_positions
        gone = np.setdiff1d(before, positions, assume_unique=True)
        came = np.setdiff1d(positions, before, assume_unique=True)
        if len(self._recalled):
            self.recall(np.setdiff1d(self._recalled, gone, assume_unique=True))
        self._rows["state"][gone] = state
        self._rows["state"][came] = State.HELD
        self.attention.note_restored(came)
        count = len(positions)
        if count > len(self._held):
            self._held = np.zeros(max(count, 2 * len(self._held)), np.int64)
        self._held[:count] = positions
        self._held_count = count
        return gone, came

    def recall(self, positions: NDArray[np.int64]) -> None:
        """Set the flag `RECALLED` of the rows at these positions; clear it of all other rows."""
        flags = self._rows["flags"]
        flags[self._recalled] &= ~np.uint8(Flag.RECALLED)
        flags[positions] |= np.uint8(Flag.RECALLED)
        self._recalled = positions

    def mark_gone(self, positions: NDArray[np.int64]) -> None:
        """Record that archived rows at these positions were deleted from the archive."""
        archived = positions[self._rows["state"][positions] == State.ARCHIVED]
        self._rows["state"][archived] = State.GONE

    def rows(self, start: int = 0) -> NDArray[np.void]:
        """A copy of the table's rows from stream position `start` on, structured as `ROW`."""
        return self._rows[start : self.seen].copy()

    def load(
        self,
        rows: NDArray[np.void],
        held: NDArray[np.int64],
        log_decay: float,
        recalled: NDArray[np.int64] | None = None,
    ) -> None:
        """Replace the whole table by saved `rows`; rows at the positions `held` are in the cache.

        All other rows count as lost, until `archive` records that they are archived.
        """
        self.seen, self.log_decay = len(rows), log_decay
        self._grow(len(rows), len(held))
        self._rows[: len(rows)] = rows
        self._rows["state"][: len(rows)] = State.GONE
        self._rows["state"][held] = State.HELD
        self._held[: len(held)] = held
        self._held_count = len(held)
        self._rows["flags"][: len(rows)] &= ~np.uint8(Flag.RECALLED)
        self._recalled, self._pinned = np.zeros(0, np.int64), None
        if recalled is not None:
            self.recall(recalled)

    def archive(self, positions: NDArray[np.int64]) -> None:
        """Record that the rows at these positions are in the archive; skips rows in the cache."""
        gone = positions[self._rows["state"][positions] == State.GONE]
        self._rows["state"][gone] = State.ARCHIVED

    def erase(self, positions: NDArray[np.int64]) -> None:
        """Delete ids, surprisals, learned scores, flags and attention of the rows at positions.

        The rows must not be in cache or archive. Their turns, rounds and roles stay recorded.
        """
        rows = self._rows
        rows["token_id"][positions], rows["surprisal"][positions] = 0, 0.0
        rows["learned_score"][positions] = math.nan
        rows["flags"][positions], self._pinned = Flag.ERASED, None
        self.attention.erase(positions)
        rows["state"][positions] = State.GONE

    def truncate(self, seen: int, log_decay: float) -> None:
        """Remove the rows of all but the conversation's first `seen` tokens; set `log_decay`.

        None of the removed rows may be in the cache.
        """
        self._rows["flags"][seen : self.seen] = 0
        self._rows["state"][seen : self.seen] = State.HELD
        self.seen, self.log_decay = seen, log_decay
        if self._pinned is not None:
            self._pinned = self._pinned[self._pinned < seen]

    def pin(self, positions: range | NDArray[np.int64], pinned: bool) -> None:
        """Pin the rows at these stream positions if `pinned` is true, else unpin the rows."""
        self.flag(Flag.PINNED, positions, pinned)

    def flag(self, flag: Flag, positions: range | NDArray[np.int64], on: bool) -> None:
        """Set `flag` of the rows at these positions if `on` is true, else clear the flag."""
        at = np.asarray(positions, np.int64)
        flags = self._rows["flags"][at]
        self._rows["flags"][at] = flags | flag if on else flags & ~flag
        if flag & Flag.PINNED:
            self._pinned = None

    def pin_only(self, positions: NDArray[np.int64]) -> None:
        """Pin the rows at these positions, and unpin all other rows."""
        self.pin(self.pinned_positions, False)
        self.pin(positions, True)
        self._pinned = np.unique(positions)

    def close_round(self, decay: float, spared: int | None = None) -> None:
        """Multiply the surprisal and attention of all rows by `decay` (SirLLM, Algorithm 1).

        If `spared` is the number of the last round, the rows of this round stay unchanged.
        """
        self.log_decay += math.log(decay)
        if spared is not None:
            start = bisect_left(self.column("round"), spared)  # numpy's search copies the column
            self._rows["birth_decay"][start : self.seen] = self.log_decay
            self.attention.spare_from_decay(start, self.log_decay)

    def surprisal_of(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Surprisals [n], in nats, of the tokens at stream `positions` [n].

        The first token of the stream, which nothing predicts, gets `unknown_surprisal`.
        """
        surprisal = self._rows["surprisal"][positions].astype(np.float64)
        return np.where(np.isnan(surprisal), self.unknown_surprisal, surprisal)

    def log_decayed_surprisal_of(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The log [n] of each token's surprisal times all decays since the token was read.

        Logarithms are used because a product of many decays, such as 0.7^300, underflows.
        """
        with np.errstate(divide="ignore"):
            log_surprisal = np.log(self.surprisal_of(positions))
        return log_surprisal + (self.log_decay - self._rows["birth_decay"][positions])

    def view(self, at: NDArray[np.int64], *, sinks: int, protected: NDArray[np.bool_]) -> HeldRows:
        """The table of the tokens at stream positions `at` [n], ascending, as policies see it.

        `sinks` is the number of sinks; the mask `protected` [n] marks the rows that must stay.
        """
        columns = self._rows
        flags = columns["flags"][at]

        def tensor(array: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array))

        unused = torch.zeros(len(at), dtype=torch.float64)
        return HeldRows(
            position=tensor(at.copy()),
            token_id=tensor(columns["token_id"][at]),
            turn=tensor(columns["turn"][at]),
            round=tensor(columns["round"][at]),
            role=tensor(columns["role"][at]),
            surprisal=tensor(self.surprisal_of(at)),
            log_decay_since=tensor(self.log_decay - columns["birth_decay"][at]),
            log_decayed_surprisal=tensor(self.log_decayed_surprisal_of(at)),
            attention=tensor(self.attention.totals(at, self.log_decay)),
            recent_attention=tensor(self.attention.recent(at)),
            repeat_attention=tensor(self.attention.repeat.of(at)),
            learned_score=tensor(columns["learned_score"][at].astype(np.float64)),
            key_norm=unused,
            key_similarity=unused,
            value_norm=unused,
            value_range=unused,
            arrival_key=tensor(columns["arrival_key"][at]),
            is_pinned=tensor((flags & Flag.PINNED).astype(bool)),
            is_anchor=tensor((flags & Flag.ANCHOR).astype(bool)),
            continues_word=tensor((flags & Flag.CONTINUES).astype(bool)),
            is_sink=tensor(at < sinks),
            protected=tensor(protected),
            seen=self.seen,
            seed=self.seed,
        )

    def held(self, *, sinks: int, protected: NDArray[np.bool_]) -> HeldRows:
        """The table of the tokens in the cache, as policies see it; arguments as in `view`."""
        return self.view(self.held_positions, sinks=sinks, protected=protected)

    def _add_arrival_keys(self, start: int) -> None:
        """Compute the arrival keys (random numbers) of the rows from position `start` on."""
        positions = np.arange(start, len(self._rows))
        self._rows["arrival_key"][start:] = uniform(self.seed, Purpose.ARRIVAL, positions)

    def _grow(self, rows: int, held: int) -> None:
        """Make the table long enough for `rows` rows, of which `held` are in the cache."""
        capacity = len(self._rows)
        if rows > capacity:
            size = max(rows, 2 * capacity)
            self._rows = np.concatenate([self._rows, np.zeros(size - capacity, ROW)])
            self._add_arrival_keys(capacity)
        if held > len(self._held):
            grown = np.zeros(max(held, 2 * len(self._held)), np.int64)
            grown[: self._held_count] = self.held_positions
            self._held = grown
