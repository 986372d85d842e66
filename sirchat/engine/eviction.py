"""Makes room within the KV cache's budget: sinks + pins + E; the policy chooses what stays.

Sinks (the first tokens of the stream) and pins are never evicted. The eviction policy chooses the
tokens in the other E places. Recalled tokens take some of those places until the round ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sirchat.engine.extra_passes import recompute_rows
from sirchat.engine.reader import Reader
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.errors import SettingError
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, HeldRows, MovedRows, Placement, Role

MIN_EVICTABLE = 8  # tokens that sinks, pins and recall leave to the policy
# Under `recall_n: auto`: tokens restored where no quarter of the room is more, and tokens left
# to the policy beside these.
_MAX_AUTO_RECALLED, _AUTO_UNRECALLED = 400, 64
_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Division:
    """How the budget is divided at one moment. All numbers are tokens (cache slots)."""

    total: int  # the budget; the model's context length if the policy never evicts
    hard_bound: int  # most tokens at any time; above the budget only under `between-turns`
    sinks: int
    pins: int  # pinned tokens that are held, without sinks
    max_pins: int | None  # most tokens that may be pinned; None: no limit
    evictable: int  # E, that the policy decides about
    protected: int  # most tokens of the current round that are protected from eviction
    chunk_size: int  # ids for which room is made at once while a turn is read
    eviction_block: int  # tokens evicted at once while a reply is generated


class PolicyChoice:
    """Chooses by the policy in `settings`, and moves no token.

    `round` is the current round, whose newest tokens are protected from eviction.
    """

    def __init__(self, settings: CacheSettings, context_length: int, store: KeyValueStore) -> None:
        self.settings, self._context_length = settings, context_length
        self.store, self.ledger = store, store.ledger
        self.round = 0

    def divide_budget(
        self, holdable: Positions | None = None, budget: int | None = None
    ) -> Division:
        """Divide the budget among the tokens at positions `holdable`, by default the held ones."""
        settings, policy = self.settings, self.settings.policy
        is_bounded = policy.bounded
        total = (budget or settings.budget) if is_bounded else self._context_length
        may_exceed = settings.evict == "between-turns" and is_bounded
        sinks = settings.honoured_sinks
        held_pins = pins = self._count_pins(self.ledger.held_positions)
        if holdable is not None:
            pins = self._count_pins(holdable)
        evictable = max(MIN_EVICTABLE, total - sinks - pins)
        protected = policy.newest_room(evictable) // 2
        limits_pins = is_bounded and policy.honours_pins
        return Division(
            total=total,
            hard_bound=max(total, self._context_length) if may_exceed else total,
            sinks=sinks,
            pins=held_pins,
            max_pins=min(total // 2, total - sinks - MIN_EVICTABLE) if limits_pins else None,
            evictable=evictable,
            protected=protected,
            chunk_size=max(1, min(evictable // 4, protected)),
            eviction_block=min(max(8, total // 16), protected),
        )

    def smallest_budget_for(self, tokens: int) -> int | None:
        """The smallest budget with at least `tokens` places for the policy (E), if one suffices.

        Candidates are the powers of two below the context length, and the context length.
        """
        size = MIN_EVICTABLE
        while size < self._context_length:
            size = min(2 * size, self._context_length)
            division = self.divide_budget(budget=size)
            leaves_room = size - division.sinks - division.pins >= MIN_EVICTABLE
            if leaves_room and division.evictable >= tokens:
                return size
        return None

    def free_budget(self, incoming: int = 0) -> int:
        """The budget without sinks, pins and a turn of `incoming` ids, in tokens."""
        division = self.divide_budget()
        return min(division.total, division.hard_bound - incoming) - division.sinks - division.pins

    def check_pins(self, new_pins: int, positions: Positions | None = None) -> None:
        """Raise SettingError if `new_pins` more pins would leave too little room.

        Existing pins are counted at `positions`, by default all held and archived tokens.
        """
        division = self.divide_budget()
        if division.max_pins is None:
            return
        positions = self.reachable() if positions is None else positions
        pins = self._count_pins(positions)
        pins += new_pins - min(new_pins, max(0, division.sinks - self.ledger.seen))
        if pins > division.max_pins:
            raise SettingError(
                f"{pins} tokens would be pinned, but budget {division.total} allows only "
                f"{division.max_pins}",
                hint=f"raise the budget, {self._unpinning_hint(positions)}",
            )

    def pinned(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n] of the pinned tokens at `positions` [n]; none if the policy ignores pins."""
        if not self.settings.policy.honours_pins:
            return np.zeros(len(positions), bool)
        return (self.ledger.column("flags")[positions] & np.uint8(Flag.PINNED)).astype(bool)

    def sinks_and_pins(self, positions: Positions) -> NDArray[np.bool_]:
        """Mask [n] of the tokens at `positions` [n] that are never evicted."""
        return (positions < self.settings.honoured_sinks) | self.pinned(positions)

    def reachable(self) -> Positions:
        """Stream positions of all tokens that can be held, with those set aside for recall."""
        reachable, aside = self.store.reachable(), self.store.placement.aside
        if len(left_out := self.ledger.left_out):
            reachable = np.setdiff1d(reachable, left_out, assume_unique=True)
        return np.union1d(reachable, aside) if len(aside) else reachable

    def view(self, positions: Positions, round: int | None = None) -> HeldRows:
        """The tokens at stream `positions` [n], held or archived, as the policy's input.

        Sinks, pins and, if `round` is given, its newest tokens are protected from eviction.
        """
        settings, division, ledger = self.settings, self.divide_budget(positions), self.ledger
        protected = self.sinks_and_pins(positions)
        if settings.protect and round is not None:
            is_current = ledger.column("round")[positions] == round
            protected |= is_current & (positions >= ledger.seen - division.protected)
        rows = ledger.view(positions, sinks=division.sinks, protected=protected)
        columns = dict[Any, Any]()
        if settings.policy.key_value_stats and len(positions):
            columns |= self.store.statistics(positions, settings.policy.key_value_stats)
        if settings.policy.needs == "keys" and len(positions):
            columns["keys"], columns["values"] = self.store.as_read(positions)
        return replace(rows, **columns) if columns else rows

    def keep(self, rows: HeldRows, count: int) -> Positions:
        """Stream positions of the `count` of `rows` that the policy keeps.

        Raises SettingError if its choice is invalid, or whatever the policy raises.
        """
        positions = rows.position.numpy().copy()  # a policy may change what it is given
        chosen = self.settings.policy.keep(rows, count)
        is_valid = len(chosen) == count and bool((chosen.diff() > 0).all())
        if count and is_valid:
            is_valid = int(chosen[0]) >= 0 and int(chosen[-1]) < len(rows)
        if not is_valid or int(rows.protected[chosen].sum()) < int(rows.protected.sum()):
            raise SettingError(
                f"policy {type(self.settings.policy).__name__} made an invalid choice of tokens",
                hint="`sirchat policies check` shows why; /policy NAME chooses another policy",
            )
        kept: Positions = positions[chosen.numpy()]
        return kept

    def keep_at_most(self, positions: Positions, most: int) -> Positions:
        """The tokens at these positions; if more than `most`, those that the policy keeps."""
        if len(positions) <= most:
            return positions
        return self.keep(self.view(positions, self.round), most)

    def keep_required(
        self, positions: Positions, is_required: NDArray[np.bool_], most: int
    ) -> Positions:
        """The required tokens at `positions` [n], and others up to `most` in all."""
        count = max(most, int(is_required.sum()))
        if count >= len(positions):
            return positions
        rows = replace(self.view(positions), protected=torch.from_numpy(is_required))
        return self.keep(rows, count)

    def reduce(self, positions: Positions) -> Positions:
        """Those of the tokens at `positions` that stay right after an anchor, although all fit."""
        policy = self.settings.policy
        rows = policy.reduce(self.view(positions)) if policy.compacts_at_anchors else None
        return positions if rows is None else positions[rows.numpy()]

    def _count_pins(self, positions: Positions) -> int:
        """The number of pinned tokens at `positions`, not counting sinks."""
        return int((self.pinned(positions) & (positions >= self.settings.honoured_sinks)).sum())

    def _unpinning_hint(self, positions: Positions) -> str:
        """How the user can unpin most: the turn with most pins, if that is no system prompt."""
        pinned = positions[self.pinned(positions)]
        roles = self.ledger.column("role")[pinned]
        of_turn = self.ledger.column("turn")[pinned[roles != Role.SYSTEM]]
        if not len(of_turn) or 2 * len(of_turn) < len(pinned):
            return "unpin something, turn off tools, or set pin_system false"
        turn = int(np.bincount(of_turn).argmax())
        return f"or unpin something: /unpin turn {turn} lets go of {(of_turn == turn).sum()}"


class Evictor:
    """Makes room for new tokens in the KV cache of one conversation, by its policy's choice.

    Between `begin_recall` and `end_recall`, recalled tokens are held, and others are aside, in the
    archive.
    """

    def __init__(self, choice: PolicyChoice, reader: Reader) -> None:
        self._choice, self._reader = choice, reader
        self._store, self._ledger, self._cache = choice.store, choice.ledger, choice.store.cache
        self._expected_tokens = 0  # of the turn and its reply at most, under `before-turn`

    def make_room(self, count: int) -> list[MovedRows]:
        """Evict tokens, if necessary, so that `count` more fit.

        Right after an anchor, the policy's `reduce` evicts first. During recall, tokens of earlier
        rounds are set aside, then recalled tokens leave; if both are too few, recall ends.
        """
        evicted = self._reduce_at_anchor()
        excess = self._cache.length + count - self._choice.divide_budget().hard_bound
        if excess <= 0 or self._set_aside(excess):
            return evicted
        return evicted + self.end_recall(count)

    def make_room_for_turn(self, count: int, max_new: int, turn: TurnRef) -> list[MovedRows]:
        """Evict tokens before a user turn of `count` ids, as the setting `evict` says.

        Under `between-turns` the cache is enlarged for the turn and its reply.
        """
        evicted = self.end_recall()
        choice, expected_tokens = self._choice, count + max_new
        choice.round, self._expected_tokens = turn.round, 0
        if choice.settings.evict == "when-full" or not choice.settings.policy.bounded:
            return evicted
        division = choice.divide_budget()
        rows = choice.view(self._ledger.held_positions, turn.round)
        may_exceed = choice.settings.evict == "between-turns"
        most = division.total - (0 if may_exceed else expected_tokens)
        num_keep = max(most, int(rows.protected.sum()))
        if num_keep < len(rows):
            evicted += self._store.evict_all_but(choice.keep(rows, num_keep))
        if may_exceed:
            self._cache.grow_to(min(division.hard_bound, self._cache.length + expected_tokens))
        else:
            self._expected_tokens = expected_tokens
        return evicted

    def next_evicted(self, round: int | None) -> Positions:
        """Positions [k] of the tokens that will be evicted next; empty while there is much room.

        If `round` is given, its newest tokens are protected.
        """
        choice, division = self._choice, self._choice.divide_budget()
        has_room = self._cache.length + 2 * division.eviction_block <= division.total
        if has_room or not choice.settings.policy.bounded:
            return _NO_POSITIONS
        held, block = self._store.placement.held_without_recalled, division.eviction_block
        if choice.settings.evict == "between-turns":
            round, block = None, max(0, len(held) - division.total)
        rows = choice.view(held, round)
        count = min(block, int((~rows.protected).sum()))
        if not count:
            return _NO_POSITIONS
        return np.setdiff1d(held, choice.keep(rows, len(held) - count), assume_unique=True)

    def exclude(self, positions: Positions) -> list[MovedRows]:
        """Evict these tokens, except sinks, for good: only an undo restores them."""
        positions = positions[positions >= self._choice.settings.honoured_sinks]
        self._ledger.flag(Flag.EXCLUDED, positions, True)
        return self._store.place(self._store.placement.without(positions))

    def evict_until_recalled(self, positions: Positions) -> None:
        """Evict the tokens at these positions. From now on, only recall may restore them."""
        ledger = self._ledger
        ledger.pin(np.intersect1d(positions, ledger.pinned_positions), False)
        ledger.left_out = np.union1d(ledger.left_out, positions)
        self._store.place(self._store.placement.without(positions))

    @contextmanager
    def without_tokens_from(self, position: int) -> Iterator[None]:
        """Context manager: archives the tokens from stream `position` on, and turns recall off.

        The tokens stay archived afterwards, so the archive must be unlimited. Recall must have
        ended.
        """
        settings, held = self._choice.settings, self._ledger.held_positions.copy()
        self._store.place(Placement(held[held < position]))
        self._choice.settings = replace(settings, recall=None)
        try:
            yield
        finally:
            self._choice.settings = settings

    def hold(self, positions: Positions) -> None:
        """Restore the tokens at these positions; if not all tokens fit, the policy chooses."""
        held = np.union1d(self._ledger.held_positions, positions)
        most = self._choice.divide_budget().hard_bound
        self._store.place(Placement(self._choice.keep_at_most(held, most)))

    def recall_room(self, incoming: int) -> int:
        """Most recalled tokens that fit beside a turn of `incoming` ids; 0 if recall is off."""
        settings = self._choice.settings
        if settings.recall is None or not settings.policy.bounded:
            return 0
        return recall_limit(settings.recall.n, self._choice.free_budget(incoming))

    def begin_recall(
        self,
        chosen: Positions,
        scores: NDArray[np.float64] | None = None,
        *,
        incoming: int,
        focused: bool = False,
    ) -> list[MovedRows]:
        """Hold the tokens at positions `chosen` [n] for the next turn, of `incoming` ids.

        The tokens that the policy ranks lowest are set aside for them; with `focused`, all but
        sinks, pins and the newest round. Tokens with the lowest `scores` [n] leave first when room
        is needed later. Raises ValueError if the tokens do not fit the budget.
        """
        choice, moves = self._choice, self.end_recall()
        if not (len(chosen) or focused):
            return moves
        held, total = self._ledger.held_positions.copy(), choice.divide_budget().total
        restored = np.setdiff1d(chosen, held)
        is_required = choice.sinks_and_pins(held) | np.isin(held, chosen)
        most = total - len(restored)
        if is_required.sum() > most:
            raise ValueError(f"{len(restored)} tokens can't be recalled within budget {total}")
        candidates = held
        if focused:
            rounds = self._ledger.column("round")[held]
            is_near = is_required | (rounds == rounds.max(initial=0))
            candidates, is_required = held[is_near], is_required[is_near]
        elif choice.settings.evict != "between-turns":  # which lets the turn exceed the budget
            most -= max(incoming, self._expected_tokens)
        kept = choice.keep_required(candidates, is_required, most)
        aside = np.setdiff1d(held, kept, assume_unique=True)
        self.reread(restored)
        wanted = chosen if scores is None else chosen[np.argsort(scores, kind="stable")]
        placement = Placement(np.union1d(kept, restored), restored, aside, wanted)
        return moves + self._store.place(placement)

    def end_recall(self, count: int = 0) -> list[MovedRows]:
        """Evict the recalled tokens, and restore the tokens that were set aside for them.

        Returns what is evicted so that `count` more fit; without recall that is all it does.
        """
        placement, kept = self._store.placement, self.held_at_end(count)
        if not placement.has_recall and len(kept) == len(placement.held):
            return []
        return self._store.evict_all_but(kept)

    @contextmanager
    def ending_recall_on_error(self) -> Iterator[None]:
        """Context manager: ends recall if the block fails or ends early."""
        try:
            yield
        except BaseException:
            self.end_recall()
            raise

    def held_at_end(self, count: int = 0) -> Positions:
        """Stream positions [n] held if recall ended now, with room for `count` more tokens."""
        most = self._choice.divide_budget().hard_bound - count
        return self._choice.keep_at_most(self._store.placement.policy_positions, most)

    def reread(self, positions: Positions) -> None:
        """Compute and archive the keys and values of the lost tokens among `positions` again."""
        lost = self._store.rereadable(positions)
        if len(lost):
            sinks = max(1, self._choice.settings.sinks)  # models expect a first token to attend to
            for rows in recompute_rows(self._reader, lost, sinks):
                self._store.add_reread(rows)

    def _set_aside(self, excess: int) -> bool:
        """Take `excess` tokens out of the cache: first those of earlier rounds, then recalled ones.

        Returns False, changing nothing, if these are too few, or if recall has moved no tokens.
        """
        now, choice = self._store.placement, self._choice
        if not now.has_recall:
            return False
        own = now.held_without_recalled
        stays = choice.sinks_and_pins(own) | (self._ledger.column("round")[own] == choice.round)
        kept = choice.keep_required(own, stays | np.isin(own, now.wanted), len(own) - excess)
        excess -= len(own) - len(kept)
        may_leave = now.wanted[~np.isin(now.wanted, own[stays])]
        if excess > len(may_leave):
            return False
        held = np.union1d(kept, now.recalled)
        after = replace(now, held=held).without(may_leave[:excess])
        aside = np.union1d(now.aside, np.setdiff1d(own, after.held, assume_unique=True))
        self._store.place(replace(after, aside=aside))
        return True

    def _reduce_at_anchor(self) -> list[MovedRows]:
        """Right after an anchor, evict the tokens that the policy's `reduce` leaves out."""
        flags, placement = self._ledger.column("flags"), self._store.placement
        if not (len(flags) and flags[-1] & Flag.ANCHOR):
            return []
        own = placement.policy_positions
        evicted = np.setdiff1d(own, self._choice.reduce(own), assume_unique=True)
        if len(evicted):
            self._store.place(placement.without(evicted))
        return self._store.evicted_rows(evicted)


def recall_limit(wanted: int | None, room: int) -> int:
    """The most tokens that recall may restore: `wanted`, or fewer if they do not fit.

    `wanted` is None under `recall_n: auto`. `room` is the budget without sinks and pins.
    """
    # Measured with SmolLM2 and facts in 4,000 tokens of real talk, when recall filled all that it
    # might: at any budget more room found more facts, up to 400 rows or three quarters of it. But
    # where only 25 rows were left to the policy, text was harder to predict, by 0.06 nats a token.
    if wanted is None:
        wanted = max(room // 4, min(room - _AUTO_UNRECALLED, _MAX_AUTO_RECALLED))
        wanted = min(wanted, 3 * room // 4)
    return max(0, min(wanted, room - MIN_EVICTABLE))
