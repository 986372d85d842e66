"""Where tokens are during recall: recalled ones are held for a round, others aside for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sirchat.engine.extra_passes import recompute_rows
from sirchat.engine.policy_choice import MIN_EVICTABLE, PolicyChoice
from sirchat.engine.reader import Reader
from sirchat.memory.key_values import Positions
from sirchat.memory.placement import EvictedRows, Moves, Placement

# Under `recall_n: auto`: most tokens restored, and tokens left to the policy beside these.
_MAX_AUTO_RECALLED, _AUTO_UNRECALLED = 400, 64


class RecalledTokens:
    """Holds recalled tokens from `begin` to `end`; others are in the archive meanwhile, aside."""

    def __init__(self, choice: PolicyChoice, reader: Reader) -> None:
        self._choice, self._reader = choice, reader
        self._store, self._ledger = choice.store, choice.ledger
        self.expected_tokens = 0  # of the turn and its reply at most, under `before-turn`

    def room(self, incoming: int) -> int:
        """Most recalled tokens that fit beside a turn of `incoming` ids; 0 if recall is off."""
        settings = self._choice.settings
        if settings.recall is None or not settings.policy.bounded:
            return 0
        return recall_limit(settings.recall.n, self._choice.free_budget(incoming))

    def begin(
        self,
        chosen: Positions,
        scores: NDArray[np.float64] | None = None,
        *,
        incoming: int,
        focused: bool = False,
    ) -> Moves:
        """Hold the tokens at positions `chosen` [n] for the next turn, of `incoming` ids.

        The tokens that the policy ranks lowest are set aside for them; with `focused`, all but
        sinks, pins and the newest round. Tokens with the lowest `scores` [n] leave first when room
        is needed later. Raises ValueError if the tokens do not fit the budget.
        """
        choice, moves = self._choice, Moves(self.end())
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
            most -= max(incoming, self.expected_tokens)
        kept = choice.keep_required(candidates, is_required, most)
        aside = np.setdiff1d(held, kept, assume_unique=True)
        self.reread(restored)
        wanted = chosen if scores is None else chosen[np.argsort(scores, kind="stable")]
        placement = Placement(np.union1d(kept, restored), restored, aside, wanted)
        return moves + self._store.place(placement)

    def step_aside(self, excess: int) -> bool:
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

    def end(self, count: int = 0) -> list[EvictedRows]:
        """Evict the recalled tokens, and restore the tokens that were set aside for them.

        Returns what is evicted so that `count` more fit; without recall that is all it does.
        """
        placement, kept = self._store.placement, self.held_at_end(count)
        if not placement.has_recall and len(kept) == len(placement.held):
            return []
        return self._store.evict_all_but(kept)

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """Context manager: ends recall if the block fails or ends early."""
        try:
            yield
        except BaseException:
            self.end()
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
