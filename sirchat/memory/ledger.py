"""The ledger: a table with one row for each token ever read, held or not.

The table is an array that grows by doubling, with 40 bytes a token, and 16 more if attention is
recorded. All columns but attention are recorded under any policy, so that policies can be switched.
`HeldRows` is what a policy sees of it, and `Placement` says where the tokens are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.memory.attention import AttentionStats
from sirchat.memory.key_values import Positions
from sirchat.memory.random_numbers import Purpose, uniform


class Role(IntEnum):
    """Who wrote a token. `TEMPLATE` is for tokens that the chat template puts around the text."""

    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TEMPLATE = 3
    TOOL = 4  # what a tool returned


class Flag(IntFlag):
    PINNED = 1  # protected from eviction
    ANCHOR = 2  # ends a sentence or round
    ERASED = 4  # its id and surprisal were deleted
    RECALLED = 8  # restored for this round by recall
    CONTINUES = 16  # belongs to the same word as the token before it
    EXCLUDED = 32  # evicted and never restored: an old system prompt, or a reply's reasoning
    THINKING = 64  # a reply's reasoning, or a mark around it
    RULE = 128  # of a rule for replies, or a preference, that was pinned when it was said


class State(IntEnum):
    """Where a token's keys and values are."""

    HELD = 0
    NOT_STORED = 1
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
    ],
    align=True,
)

_PINNED = int(Flag.PINNED)

# The name of a statistic of a token's key k and value v in one head: the L2 norm |k|; the cosine
# between k, rotated as attention reads it, and the mean of k / |k| over all tokens that the policy
# ranks; the L1 norm |v|.
KeyValueStat = Literal["key_norm", "key_similarity", "value_norm"]


@dataclass(frozen=True)
class HeldRows:
    """The n tokens among which a policy chooses, in stream order: tensors [n] on the CPU.

    These are the held tokens; after a change of settings or pins, archived tokens, too.
    """

    position: Tensor  # in the stream, ascending
    token_id: Tensor
    turn: Tensor
    round: Tensor
    role: Tensor  # one of `Role`
    surprisal: Tensor  # nats; of the stream's first token, the highest of those read with it
    log_decay_since: Tensor  # log of the product of the decays since the token was read
    log_decayed_surprisal: Tensor  # log of the surprisal times these decays
    attention: Tensor  # received so far; 0 if attention is not recorded
    recent_attention: Tensor  # received from the newest queries alone
    # [layers, heads, n]: the same for each query head; [1, 1, n] if the policy does not want it
    head_attention: Tensor
    key_norm: Tensor  # this and the next two: see `KeyValueStat`; 0 if the policy uses none
    key_similarity: Tensor
    value_norm: Tensor
    arrival_key: Tensor  # uniform in [0, 1), drawn when the token was read
    is_pinned: Tensor
    is_anchor: Tensor
    is_sink: Tensor
    continues_word: Tensor  # mask of the tokens of the same word as the token before
    protected: Tensor  # mask of those that must stay: sinks, pins, newest of the round
    seen: int  # tokens ever read
    seed: int  # for the policy's random numbers
    # For a policy with `needs = "keys"`: for each layer, the keys, as attention reads them, and the
    # values [H, n, D], copies in float32; 0 for a token of which they are no longer stored.
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.position)

    def newest(self, count: int) -> Tensor:
        """Mask [n] of the tokens among the last `count` of the conversation."""
        return self.position >= self.seen - count


def _none() -> Positions:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Placement:
    """Which tokens the cache holds, or is to hold, as ascending stream positions.

    Between two rounds, only `held` is in use. The others are what recall does for the current
    round.
    """

    held: Positions  # [n]
    recalled: Positions = field(default_factory=_none)  # those of `held` that recall has restored
    aside: Positions = field(default_factory=_none)  # archived until the round is complete
    # Those of `held` that recall wants, in the order in which they leave if room is needed.
    wanted: Positions = field(default_factory=_none)

    @property
    def has_recall(self) -> bool:
        """Whether recall has moved tokens for this round."""
        return any(map(len, (self.recalled, self.aside, self.wanted)))

    @property
    def held_without_recalled(self) -> Positions:
        """The held tokens that recall did not restore."""
        if not len(self.recalled):
            return self.held
        return np.setdiff1d(self.held, self.recalled, assume_unique=True)

    @property
    def policy_positions(self) -> Positions:
        """The policy's tokens: held ones that recall did not restore, and those set aside."""
        held = self.held_without_recalled
        return np.union1d(held, self.aside) if len(self.aside) else held

    def without(self, positions: Positions) -> Placement:
        each = (self.held, self.recalled, self.aside, self.wanted)
        return Placement(*(at[~np.isin(at, positions)] for at in each))


@dataclass(frozen=True)
class MovedRows:
    """Record: the tokens at stream `positions` were evicted, or `restored`."""

    positions: Positions
    resident: int  # tokens held now
    seen: int
    restored: bool = False


class TokenVectors:
    """A vector [D] for each of a run of tokens that ends with the newest token.

    Vectors are kept only if they are `wanted`. Vectors of erased tokens are NaN.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._start = self._count = 0  # stream position of the first one, and how many there are
        self._rows = torch.zeros(0, 0)

    def append(self, start: int, numbers: Tensor) -> None:
        """Add the vectors [m, D] of tokens from stream position `start` on.

        Earlier vectors are dropped if they do not end right before `start`.
        """
        count = self._count
        if start != self._start + count or numbers.shape[1] != self._rows.shape[1]:
            self._start, count = start, 0
        needed = count + len(numbers)
        if needed > len(self._rows) or not count:
            grown = torch.empty(max(needed, 2 * count, 64), numbers.shape[1])
            if count:
                grown[:count] = self._rows[:count]
            self._rows = grown
        self._rows[count:needed] = numbers
        self._count = needed

    def mean(self, start: int, end: int) -> Tensor | None:
        """The mean [D] of the vectors from `start` to `end` - 1; None if any is missing or NaN."""
        offset = start - self._start
        if not 0 <= offset < offset + end - start <= self._count:
            return None
        mean = self._rows[offset : offset + end - start].mean(0)
        return None if mean.isnan().any() else mean

    def drop_before(self, position: int) -> None:
        """Drop the vectors of the tokens before this stream position."""
        dropped = min(max(0, position - self._start), self._count)
        self._rows = self._rows[dropped : self._count].clone()
        self._start, self._count = self._start + dropped, self._count - dropped

    def truncate(self, seen: int) -> None:
        """Drop the vectors of all but the first `seen` tokens of the stream."""
        self._count = min(self._count, max(0, seen - self._start))
        self._rows[self._count :] = torch.nan  # what was erased stays nowhere

    def erase(self, positions: Positions) -> None:
        offset = positions - self._start
        self._rows[torch.from_numpy(offset[(offset >= 0) & (offset < self._count)])] = torch.nan


class Ledger:
    """A table with one row for each token of the conversation, held or evicted.

    Held tokens are in stream order: held token i is in slot i of the cache. Only methods change the
    attributes, except `left_out`, `torn`, `saved`, `flagged`, `token_vectors`, `unknown_surprisal`.
    """

    def __init__(self, seed: int = 0, unknown_surprisal: float = 0.0) -> None:
        self.seed = seed
        self.seen = 0  # number of tokens ever read
        self.held_count = 0
        self.pinned_positions: Positions = np.zeros(0, np.int64)  # ascending, held or not
        # Ascending, of tokens in turns that were taken out of the conversation: policies ignore
        # these tokens, but recall may restore them.
        self.left_out: Positions = np.zeros(0, np.int64)
        # Ascending, of all tokens of sentences from which words were erased, now or before the text
        # was read again: the rest says what nobody said, so it is neither recalled nor listed.
        self.torn: Positions = np.zeros(0, np.int64)
        self.log_decay = 0.0  # log of the product of all decays
        self.unknown_surprisal = unknown_surprisal  # nats, of the first token: nothing predicts it
        self.attention = AttentionStats()
        self.token_vectors = TokenVectors()
        # All rows before position `saved` are saved, except the flags of the tokens at `flagged`.
        self.saved, self.flagged = 0, set[int]()
        self._rows = np.zeros(1024, ROW)
        self._add_arrival_keys(0)
        self._held = np.zeros(1024, np.int64)
        self._recalled = self._held[:0]

    @property
    def held_positions(self) -> Positions:
        """Stream positions [n] of the held tokens, ascending (a view)."""
        return self._held[: self.held_count]

    @property
    def archived_count(self) -> int:
        """Number of archived tokens that are not held."""
        return int(np.count_nonzero(self.column("state") == State.ARCHIVED))

    @property
    def rereadable_count(self) -> int:
        """Number of tokens neither held nor archived that can be read again from the text."""
        hidden = self.column("flags") & np.uint8(Flag.ERASED | Flag.EXCLUDED) != 0
        return int(np.count_nonzero((self.column("state") == State.NOT_STORED) & ~hidden))

    def of_turn(self, turn: int, role: Role | None = None) -> Positions:
        """Stream positions of the tokens of turn number `turn`, and of `role` if given."""
        turns = self.column("turn")  # ascending; numpy's search copies the column
        at = np.arange(bisect_left(turns, turn), bisect_left(turns, turn + 1))
        return at if role is None else at[self.column("role")[at] == role]

    def held_of_turn(self, turn: int) -> int:
        return int(np.count_nonzero(self.column("turn")[self.held_positions] == turn))

    def column(self, name: str) -> NDArray[Any]:
        """The column `name` of the table, one entry per token [seen]: a read-only view."""
        column = self._rows[name][: self.seen]
        column.flags.writeable = False
        return column

    def append(
        self,
        ids: Sequence[int],
        surprisal: Sequence[float],
        *,
        turn: int,
        round: int,
        roles: Sequence[int],
        flags: Sequence[int],
    ) -> None:
        """Add a row for each of the ids that the model has just read; `surprisal` is in nats."""
        count, start, held = len(ids), self.seen, self.held_count
        end = start + count
        if end > len(self._rows) or held + count > len(self._held):
            self._grow(end, held + count)
        rows = self._rows
        if count == 1:  # one assignment: this runs for every generated token
            key, about = rows["arrival_key"][start], (roles[0], flags[0], 0)
            rows[start] = (ids[0], turn, round, surprisal[0], self.log_decay, key, *about)
            self._held[held] = start
        else:
            new = rows[start:end]
            new["token_id"], new["turn"], new["round"] = ids, turn, round
            new["surprisal"], new["birth_decay"] = surprisal, self.log_decay
            new["role"], new["flags"] = roles, flags
            self._held[held : held + count] = range(start, end)
        self.held_count += count
        self.seen = end
        if flags[0] & _PINNED if count == 1 else any(flag & _PINNED for flag in flags):
            pinned = start + np.flatnonzero(np.asarray(flags) & _PINNED)
            self.pinned_positions = np.concatenate([self.pinned_positions, pinned])

    def set_first_surprisal(self, count: int) -> None:
        """Set the first token's surprisal to the highest one of the first `count` tokens."""
        if count > 1:
            self.unknown_surprisal = float(self._rows["surprisal"][1:count].max())

    def hold(self, placement: Placement, gone: Positions, came: Positions, state: State) -> None:
        """Record where the tokens are: `gone` ones have `state` now, and `came` ones are held."""
        positions, count, flags = placement.held, len(placement.held), self._rows["flags"]
        flags[self._recalled] &= ~np.uint8(Flag.RECALLED)
        flags[placement.recalled] |= np.uint8(Flag.RECALLED)
        self._recalled = placement.recalled
        self._rows["state"][gone] = state
        self._rows["state"][came] = State.HELD
        self.attention.note_restored(came)
        if count > len(self._held):
            self._held = np.zeros(max(count, 2 * len(self._held)), np.int64)
        self._held[:count] = positions
        self.held_count = count

    def mark_archived(self, positions: Positions) -> None:
        """Record that the tokens at these positions are archived, except held ones."""
        gone = positions[self._rows["state"][positions] == State.NOT_STORED]
        self._rows["state"][gone] = State.ARCHIVED

    def mark_not_stored(self, positions: Positions) -> None:
        """Record that archived tokens at these positions were deleted from the archive."""
        archived = positions[self._rows["state"][positions] == State.ARCHIVED]
        self._rows["state"][archived] = State.NOT_STORED

    def rows(self, start: int = 0) -> NDArray[np.void]:
        """A copy of the rows from stream position `start` on, structured as `ROW`."""
        return self._rows[start : self.seen].copy()

    def load(self, rows: NDArray[np.void], held: Positions, log_decay: float) -> None:
        """Replace the table by saved `rows`. Only the tokens at `held` are stored anywhere."""
        self.seen, self.log_decay = len(rows), log_decay
        self.saved, self.flagged = len(rows), set()
        self.token_vectors.truncate(0)
        self._grow(len(rows), len(held))
        self._rows[: len(rows)] = rows
        self._rows["state"][: len(rows)] = State.NOT_STORED
        self._rows["state"][held] = State.HELD
        self._held[: len(held)] = held
        self.held_count = len(held)
        self._rows["flags"][: len(rows)] &= ~np.uint8(Flag.RECALLED)
        self._recalled = self.left_out = self.torn = np.zeros(0, np.int64)
        self.pinned_positions = np.flatnonzero(self.column("flags") & Flag.PINNED)

    def erase(self, positions: Positions) -> None:
        """Delete all but turn, round and role of tokens that are neither held nor archived."""
        rows = self._rows
        rows["token_id"][positions], rows["surprisal"][positions] = 0, 0.0
        rows["flags"][positions] = Flag.ERASED
        self.pinned_positions = np.setdiff1d(self.pinned_positions, positions)
        self.attention.erase(positions)
        self.token_vectors.erase(positions)
        rows["state"][positions] = State.NOT_STORED

    def truncate(self, seen: int, log_decay: float) -> None:
        """Remove all but the first `seen` tokens, and set `log_decay`; none removed may be held."""
        self._rows["flags"][seen : self.seen] = 0
        self._rows["state"][seen : self.seen] = State.HELD
        self.seen, self.log_decay, self.saved = seen, log_decay, min(self.saved, seen)
        self.token_vectors.truncate(seen)
        self.pinned_positions = self.pinned_positions[self.pinned_positions < seen]
        self.left_out = self.left_out[self.left_out < seen]
        self.torn = self.torn[self.torn < seen]

    def reorder(self, order: Positions, turns: Positions, rounds: Positions) -> Positions:
        """Put the tokens at the stream positions `order` [n] into this order, and drop all others.

        Dropped tokens must be neither held nor archived. `turns` [n] and `rounds` [n] are new
        columns. Returns the new position [seen] of each token, -1 if it was dropped.
        """
        rank, count = np.full(self.seen, -1, np.int64), len(order)
        rank[order] = np.arange(count)
        first = int(np.argmax(np.append(order != np.arange(count), True)))  # that moved
        rows = self._rows[order]
        rows["turn"], rows["round"] = turns, rounds
        self.attention.reorder(order, rank)
        self.token_vectors.truncate(first)
        held, pinned = np.sort(rank[self.held_positions]), rank[self.pinned_positions]
        left_out, torn = rank[self.left_out], rank[self.torn]
        self._rows[:count] = rows
        self._rows["flags"][count : self.seen] = 0
        self._rows["state"][count : self.seen] = State.HELD
        self._held[: len(held)] = held
        self.pinned_positions = np.sort(pinned[pinned >= 0])
        self.left_out = np.sort(left_out[left_out >= 0])
        self.torn = np.sort(torn[torn >= 0])
        self.seen, self.saved = count, min(self.saved, first)
        self.flagged = {at for at in self.flagged if at < first}
        return rank

    def pin(self, positions: range | Positions, pinned: bool) -> None:
        self.flag(Flag.PINNED, positions, pinned)

    def flag(self, flag: Flag, positions: range | Positions, on: bool) -> None:
        at = np.asarray(positions, np.int64)
        flags = self._rows["flags"][at]
        self._rows["flags"][at] = flags | flag if on else flags & ~flag
        self.flagged.update(at[at < self.saved].tolist())
        if flag & Flag.PINNED:
            change = np.union1d if on else np.setdiff1d
            self.pinned_positions = change(self.pinned_positions, at)

    def rules(self) -> list[Positions]:
        """Positions of the tokens pinned as rules, which still are pinned: one array per run."""
        flags = self._rows["flags"][self.pinned_positions]
        return _runs(self.pinned_positions[flags & np.uint8(Flag.RULE) != 0])

    def pins_except_rules(self, start: int) -> Positions:
        """Positions, from `start` on, of pinned tokens that are not part of a rule."""
        pinned = self.pinned_positions[bisect_left(self.pinned_positions, start) :]
        others: Positions = pinned[self._rows["flags"][pinned] & np.uint8(Flag.RULE) == 0]
        return others

    def pin_only(self, positions: Positions) -> None:
        """Pin the tokens at these positions, and unpin all others."""
        self.pin(self.pinned_positions, False)
        self.pin(positions, True)

    def apply_decay(self, decay: float) -> None:
        """Multiply surprisal and attention of all tokens by `decay` (SirLLM, Algorithm 1)."""
        self.log_decay += math.log(decay)

    def surprisal_of(self, positions: Positions) -> NDArray[np.float64]:
        """Surprisals [n] in nats at `positions` [n]; `unknown_surprisal` for tokens without."""
        surprisal = self._rows["surprisal"][positions].astype(np.float64)
        return np.where(np.isnan(surprisal), self.unknown_surprisal, surprisal)

    def log_decayed_surprisal_of(self, positions: Positions) -> NDArray[np.float64]:
        """The log [n] of each token's surprisal times all decays since it was read."""
        # A product of many decays, such as 0.7^300, would underflow.
        with np.errstate(divide="ignore"):
            log_surprisal = np.log(self.surprisal_of(positions))
        return log_surprisal + (self.log_decay - self._rows["birth_decay"][positions])

    def view(self, at: Positions, *, sinks: int, protected: NDArray[np.bool_]) -> HeldRows:
        """A policy's input: the tokens at `at` [n], ascending. Those `protected` [n] must stay."""
        rows, by_head = self._rows[at], self.attention.recent(at)
        flags = rows["flags"]
        columns = {
            "position": at.copy(),
            "surprisal": self.surprisal_of(at),
            "log_decay_since": self.log_decay - rows["birth_decay"],
            "log_decayed_surprisal": self.log_decayed_surprisal_of(at),
            "attention": self.attention.totals(at, self.log_decay),
            "recent_attention": by_head.mean((0, 1)),
            "head_attention": by_head,
            "is_pinned": flags & Flag.PINNED != 0,
            "is_anchor": flags & Flag.ANCHOR != 0,
            "continues_word": flags & Flag.CONTINUES != 0,
            "is_sink": at < sinks,
            "protected": protected,
        }
        for name in ("token_id", "turn", "round", "role", "arrival_key"):
            columns[name] = rows[name]
        for name in ("key_norm", "key_similarity", "value_norm"):
            columns[name] = np.zeros(len(at))
        tensors: dict[str, Any] = {}
        for name, column in columns.items():
            tensors[name] = torch.from_numpy(np.ascontiguousarray(column))
        return HeldRows(**tensors, seen=self.seen, seed=self.seed)

    def _add_arrival_keys(self, start: int) -> None:
        positions = np.arange(start, len(self._rows))
        self._rows["arrival_key"][start:] = uniform(self.seed, Purpose.ARRIVAL, positions)

    def _grow(self, rows: int, held: int) -> None:
        """Lengthen the table for `rows` tokens, of which `held` are in the cache."""
        capacity = len(self._rows)
        if rows > capacity:
            size = max(rows, 2 * capacity)
            self._rows = np.concatenate([self._rows, np.zeros(size - capacity, ROW)])
            self._add_arrival_keys(capacity)
        if held > len(self._held):
            grown = np.zeros(max(held, 2 * len(self._held)), np.int64)
            grown[: self.held_count] = self.held_positions
            self._held = grown


def _runs(positions: Positions) -> list[Positions]:
    """Ascending positions, divided into runs of neighbours."""
    gaps = np.flatnonzero(np.diff(positions) > 1) + 1
    return np.split(positions, gaps) if len(positions) else []
