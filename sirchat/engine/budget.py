"""Divides the cache's budget of rows among sinks, pins, the eviction policy and recall.

A row is the place of one token. budget = sinks + pins + E + reserve. Sinks (the first tokens) and
pins are never evicted. The policy decides which tokens take the E rows. The reserve is for tokens
that recall restores from the archive. The cache never has more rows than the budget, with one
exception: if the setting `evict` is `between-turns`, a turn and its reply may exceed the budget, up
to the model's context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.types import CacheSettings
from sirchat.errors import SettingError
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, HeldRows, Ledger

_LEAST = 8
"""Minimum number of cache rows that sinks and pins must leave to the policy."""

_USUAL_RESERVE, _OWN_ROWS = 400, 64

_AT_ONCE = 1024
"""Maximum number of ids in a forward pass that reads several chunks.

With longer passes, Ctrl-C would have to wait longer, because it is handled only between passes.
"""


@dataclass(frozen=True, eq=False)
class Budget:
    """How many rows (one per token) one conversation may hold in the KV cache.

    `settings` are the conversation's settings of the cache, `ledger` is its table of tokens.
    `context_length` is the maximum number of tokens that the model can read. It is the budget of a
    policy that never evicts. It is also the limit within a turn if rows are evicted only between
    turns.
    """

    settings: CacheSettings
    ledger: Ledger
    context_length: int

    @property
    def unbounded(self) -> bool:
        """Whether the eviction policy never evicts a token, as the policy `full` does."""
        return not self.settings.policy.bounded

    @property
    def total(self) -> int:
        """The budget in force: maximum number of rows in the cache.

        It is the setting `budget`, or the model's context length if the policy never evicts.
        """
        return self.context_length if self.unbounded else self.settings.budget

    @property
    def only_between_turns(self) -> bool:
        """Whether rows are evicted only between turns.

        If True, a turn and its reply may exceed the budget until the next user turn.
        """
        return self.settings.evict == "between-turns" and not self.unbounded

    @property
    def hard_bound(self) -> int:
        """Maximum number of rows in the cache at any time, even within a turn.

        It is the budget. If rows are evicted only between turns, it is the larger of the budget and
        the model's context length.
        """
        return max(self.total, self.context_length) if self.only_between_turns else self.total

    @property
    def reserve(self) -> int:
        """Number of rows of the budget that are set aside for recalled tokens; 0 without recall.

        If the setting `recall_n` is a number, the reserve is always `full_reserve`. If `recall_n`
        is `auto`, the reserve is 0 until a token has been evicted and `full_reserve` rows are free;
        rows that recall has restored count as free. `Residency.make_room_for_turn` frees these
        rows when a new turn and all earlier tokens together do not fit in the budget.
        """
        recall, size = self.settings.recall, self.full_reserve
        is_fixed = recall is None or recall.n is not None
        has_evicted = self.policy_rows < self.ledger.seen  # also if all evicted rows are recalled
        if is_fixed or (has_evicted and self.policy_rows <= self.total - size):
            return size
        return 0

    @property
    def full_reserve(self) -> int:
        """Number of rows to reserve for recalled tokens when the budget can't hold all tokens.

        It is 0 without recall, and for a policy that never evicts.
        """
        recall = self.settings.recall
        if recall is None or self.unbounded:
            return 0
        # An automatic reserve leaves room for all pins, also for those that are not held now.
        at = self.ledger.pinned_positions if recall.n is None else self.ledger.held_positions
        room = self.total - self.sinks - self.pins(at)
        return most_recalled(usual_reserve(room) if recall.n is None else recall.n, room)

    @property
    def policy_budget(self) -> int:
        """Maximum number of rows for tokens that recall has not restored.

        It is the budget minus the rows that are reserved for recall.
        """
        return self.total - self.reserve

    @property
    def policy_bound(self) -> int:
        """Maximum number of rows, at any time, for tokens that recall has not restored.

        It is `hard_bound` minus the rows that are reserved for recall.
        """
        return self.hard_bound - self.reserve

    @property
    def policy_rows(self) -> int:
        """Number of rows that the cache holds now, not counting those that recall has restored."""
        return self.ledger.held_count - len(self.ledger.recalled)

    @property
    def policy_positions(self) -> Positions:
        """Stream positions [n] of the tokens in the cache, except those that recall has restored.

        The positions are ascending.
        """
        held, recalled = self.ledger.held_positions, self.ledger.recalled
        return np.setdiff1d(held, recalled, assume_unique=True) if len(recalled) else held

    @property
    def sinks(self) -> int:
        """How many of the stream's first tokens always stay in the cache (attention sinks).

        It is 0 if the policy ignores sinks.
        """
        return self.settings.sinks if self.settings.policy.honours_sinks else 0

    @property
    def eviction_block(self) -> int:
        """Number of rows to evict at once when the cache is full while tokens are generated.

        It is at most `most_protected`, so that no protected row has to be evicted.
        """
        return min(max(8, self.policy_budget // 16), self.most_protected())

    @property
    def chunk_size(self) -> int:
        """Number of ids in a chunk: rows for a whole chunk are freed before it is read.

        It is a quarter of `evictable`, but at most `most_protected`, and at least 1.
        """
        return max(1, min(self.evictable() // 4, self.most_protected()))

    def max_prefill(self, pinned: bool) -> int:
        """Maximum number of ids that one forward pass reads: as many chunks as fit, at least one.

        Reading several chunks in one pass is faster, and the same tokens are evicted. If `pinned`
        is true, the ids become pins and are read one chunk at a time, because pins change the size
        of the next chunk.
        """
        size = self.chunk_size
        if pinned or self.compacts_at_anchors:
            return size
        free = min(self.policy_bound - self.policy_rows, _AT_ONCE)
        return size * max(1, free // size)

    def most_protected(self, at: Positions | None = None) -> int:
        """Maximum number of rows of the current round that are protected from eviction.

        It is half of the number of rows that the policy has for the newest tokens (its
        `newest_room`). `at` are the stream positions of the tokens whose pins are counted, by
        default of all tokens in the cache.
        """
        return self.settings.policy.newest_room(self.evictable(at)) // 2

    def evictable(self, at: Positions | None = None) -> int:
        """The number E of rows that the policy decides about, at least 8.

        It is the budget minus sinks, pins and the rows reserved for recall. `at` are the stream
        positions of the tokens whose pins are counted, by default of all tokens in the cache.
        """
        pins = self.pins(self.ledger.held_positions if at is None else at)
        return max(_LEAST, self.policy_budget - self.sinks - pins)

    def enough_for(self, tokens: int) -> int | None:
        """The smallest budget with which the policy decides about at least `tokens` rows.

        Only powers of two and the model's context length are tried. Returns None if even the
        context length is too small.
        """
        size = _LEAST
        while size < self.context_length:
            size = min(2 * size, self.context_length)
            if size - self.sinks - self.pins(self.ledger.held_positions) >= _LEAST:
                larger = replace(self, settings=replace(self.settings, budget=size))
                if larger.evictable() >= tokens:
                    return size
        return None

    def pins(self, at: Positions) -> int:
        """How many of the tokens at stream positions `at` are pinned, not counting sinks.

        Returns 0 if the policy ignores pins.
        """
        return int((self.pinned(at) & (at >= self.sinks)).sum())

    def pinned(self, at: Positions) -> NDArray[np.bool_]:
        """Mask [n]: which of the tokens at stream positions `at` [n] are pinned.

        All values are False if the policy ignores pins.
        """
        if not self.settings.policy.honours_pins:
            return np.zeros(len(at), bool)
        return (self.ledger.column("flags")[at] & Flag.PINNED).astype(bool)

    @property
    def most_pins(self) -> int | None:
        """The largest number of tokens that the user may pin, not counting sinks.

        Returns None if the number is not limited: the policy never evicts, or it ignores pins.
        """
        if self.unbounded or not self.settings.policy.honours_pins:
            return None
        return min(self.total // 2, self.total - self.sinks - _LEAST)

    @property
    def compacts_at_anchors(self) -> bool:
        """Whether the policy evicts rows right after each anchor is read.

        An anchor is a token into which the model compresses a sentence or a round.
        """
        return self.settings.policy.compacts_at_anchors

    def end_at_anchor(self, flags: Sequence[int], start: int, end: int) -> int:
        """The index (exclusive) at which a chunk of ids that begins at index `start` must end.

        If the policy evicts rows after each anchor, and an id from `start` to `end` - 1 is an
        anchor, the chunk must end right after the first anchor. Otherwise the chunk ends at `end`.
        `flags` has the flags of every id.
        """
        if self.compacts_at_anchors:
            return next((at + 1 for at in range(start, end) if flags[at] & Flag.ANCHOR), end)
        return end

    def visible_to_anchor(self) -> Tensor:
        """Numbers [k] of the cache rows to which the next anchor may attend.

        An anchor is a token into which the model compresses a sentence or a round. It may attend to
        the sinks and to the tokens after the previous anchor (equation (4) of Anchor-based LLMs).
        """
        held = self.ledger.held_positions
        anchors = np.flatnonzero(self.ledger.column("flags")[held] & Flag.ANCHOR)
        begins = held[anchors[-1]] + 1 if len(anchors) else 0
        return torch.from_numpy(np.flatnonzero((held >= begins) | (held < self.sinks)))

    def check_pins(self, reachable: Positions, more: int) -> None:
        """Raise SettingError if there would be more pins than `most_pins` allows.

        Counted are the pins among the tokens at stream positions `reachable`, and `more` tokens
        that are to be pinned.
        """
        allowed = self.most_pins
        if allowed is None:
            return
        pins = self.pins(reachable)
        pins += more - min(more, max(0, self.sinks - self.ledger.seen))
        if pins > allowed:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {self.total} allows only {allowed}",
                hint="raise the budget, /unpin something, or set pin_system to false",
            )

    def view(self, at: Positions, round: int | None) -> HeldRows:
        """The table of the tokens at stream positions `at` [n], as the policy sees it.

        The table marks the rows that are protected from eviction: sinks and pins. If the setting
        `protect` is on, it also marks the newest rows of the current round, at most
        `most_protected` rows. `round` is the number of the current round; if it is None, only
        sinks and pins are marked.
        """
        protected = (at < self.sinks) | self.pinned(at)
        if self.settings.protect and round is not None:
            current = self.ledger.column("round")[at] == round
            protected |= current & (at >= self.ledger.seen - self.most_protected(at))
        return self.ledger.view(at, sinks=self.sinks, protected=protected)

    def choose(self, rows: HeldRows, num_keep: int) -> Tensor:
        """Let the policy choose which `num_keep` of the `rows` stay in the cache.

        Returns the row numbers [num_keep] of these rows, int64 and ascending. Raises SettingError
        if the policy returns numbers that are not valid, or leaves out a protected row.
        """
        chosen = self.settings.policy.keep(rows, num_keep)
        if not _is_choice(chosen, rows, num_keep):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} made an invalid choice of tokens",
                hint="`sirchat policies check` shows why; /policy NAME chooses another policy",
            )
        return chosen


def usual_reserve(room: int) -> int:
    """Number of cache rows that are reserved for recall if the setting `recall_n` is `auto`.

    `room` is the number of rows of the budget that are neither sinks nor pins. The formula follows
    a measurement with SmolLM2 and facts in 4,000 tokens of real talk, when recall filled the whole
    reserve. At any budget, a larger reserve found more facts, up to 400 rows or the three quarters
    of `room` that `most_recalled` allows. But where only 25 rows were left to the policy, text was
    harder to predict, by 0.06 nats a token.
    """
    return max(room // 4, min(3 * room // 4, room - _OWN_ROWS, _USUAL_RESERVE))


def most_recalled(n: int, room: int) -> int:
    """How many cache rows are reserved for recall if `n` rows are wanted.

    `room` is the number of rows of the budget that are neither sinks nor pins. At most three
    quarters of them are reserved. The last quarter is needed to read the conversation itself.
    """
    return max(0, min(n, 3 * room // 4, room - _LEAST))


def _is_choice(rows: Tensor, held: HeldRows, num_keep: int) -> bool:
    """Whether a policy's choice `rows` is valid.

    It is valid if it has `num_keep` ascending row numbers of the table `held`, and includes all
    protected rows.
    """
    if len(rows) != num_keep or not bool((rows.diff() > 0).all()):
        return False
    if num_keep and not (int(rows[0]) >= 0 and int(rows[-1]) < len(held)):
        return False
    return int(held.protected[rows].sum()) == int(held.protected.sum())
