"""The engine: reads ids, generates ids, and holds the cache under its budget. Ids only, never text.

`make_room` is the only place that forgets. Let E = budget - sinks - pins. Ids are read in chunks
of at most E/4, and before a chunk of m at most budget - m rows are kept; while generating, room is
made in blocks, only when the cache is full. So `resident <= budget` after every forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.budget import Budget
from sirchat.engine.reader import CausalModel, Chunk, Reader
from sirchat.engine.records import (
    CacheSettings,
    ContinuationScore,
    EngineCheckpoint,
    EngineState,
    EvictedRows,
    Generated,
    Read,
    RestoredRows,
    SearchResult,
    Selection,
    Stopped,
    TurnRef,
)
from sirchat.engine.sampling import Sampler
from sirchat.errors import ContextFullError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.decay import automatic_decay
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.ledger import Flag, HeldRows, Ledger, Role
from sirchat.memory.recall import choose
from sirchat.memory.segments import Rows

_NONE = np.zeros(0, np.int64)


class Engine:
    """One conversation's cache, ledger and carried logits."""

    def __init__(
        self,
        model: CausalModel,
        settings: CacheSettings,
        *,
        seed: int = 0,
        ends_sequence: Callable[[int], bool] = lambda token_id: False,
    ) -> None:
        self._model = model
        self._ends_sequence = ends_sequence
        self._round = 0
        self.ledger = Ledger(seed, unknown_surprisal=math.log(model.vocab_size))
        self._budget = Budget(settings, self.ledger, model.context_length)
        self.cache = model.new_cache(
            min(self.budget, 1024) if self._budget.unbounded else self.budget
        )
        self.cache.in_stream = settings.in_stream
        self._reader = Reader(model, self.cache, self.ledger)
        self.store = KeyValueStore(self.cache, self.ledger, settings.archive, settings.folder)
        self._layers: tuple[NDArray[np.int64], ...] = ()  # in the reserve, layer by layer
        self._last: tuple[CacheSettings, Selection] | None = None  # of the last forward pass

    @property
    def settings(self) -> CacheSettings:
        """The settings in force."""
        return self._budget.settings

    @property
    def budget(self) -> int:
        """Rows that may be held: the setting, or the context length when nothing is forgotten."""
        return self._budget.budget

    @property
    def reserve(self) -> int:
        """Rows of the budget that are kept free for what is recalled."""
        return self._budget.reserve

    @property
    def resident(self) -> int:
        """Rows in the cache."""
        return self.cache.length

    @property
    def recalled(self) -> int:
        """Rows in the cache that came back for this round."""
        return self.resident - self._budget.policy_rows

    @property
    def recalled_positions(self) -> NDArray[np.int64]:
        """Stream positions, ascending, of what came back for this round, in any layer."""
        return np.unique(np.concatenate([self.ledger.recalled, *self._layers]))

    @property
    def logits(self) -> Tensor | None:
        """Raw logits [V] for the token to come; None before the first."""
        return self._reader.logits

    def feed(
        self, ids: Sequence[int], roles: Sequence[Role], place: TurnRef, *, pinned: bool = False
    ) -> Iterator[Read | EvictedRows]:
        """Read ids, chunk by chunk; the state is whole at every yield.

        Raises ContextFullError, with nothing read, when they do not fit and none may be forgotten.
        """
        self._round = place.round
        self.require(len(ids))
        chunk = self._chunk(ids, roles, place, pinned)
        done = 0
        while done < len(ids):
            size = max(1, self._budget.evictable() // 4)
            end = self._budget.end_at_anchor(chunk.flags, done, min(len(ids), done + size))
            yield from self.make_room(end - done)
            self._read(chunk.part(done, end))
            done = end
            yield from self._compact_at_anchor()
            yield Read(done, len(ids))

    def generate(
        self,
        sampler: Sampler,
        place: TurnRef,
        *,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        reserve: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[Generated | EvictedRows | Stopped]:
        """Generate until a stop id, `max_new_tokens`, or an interrupt; the last record says which.

        `reserve` rows stay free when nothing may be forgotten, so that the turn can be closed; then
        ContextFullError is raised.
        """
        self._round = place.round
        for _ in range(max_new_tokens):
            if interrupted():
                yield Stopped("interrupt")
                return
            if self.logits is None:
                raise RuntimeError("nothing has been read yet")
            token_id = sampler.pick(self.logits, self._held_ids, self.ledger.seen)
            if token_id in stop_ids:
                yield Stopped("stop")
                return
            self.require(1 + reserve)
            if (
                not self._budget.unbounded
                and self._budget.policy_rows >= self._budget.policy_budget
            ):
                yield from self.make_room(self._budget.eviction_block)
            self._read(self._chunk([token_id], [Role.ASSISTANT], place))
            position = self.ledger.seen - 1
            yield Generated(token_id, position, float(self.ledger.column("surprisal")[position]))
            yield from self._compact_at_anchor()
        yield Stopped("length")

    def score_continuation(self, ids: Sequence[int]) -> ContinuationScore:
        """How likely these ids are to come next; nothing is read by it, and nothing forgotten."""
        return self._reader.score_continuation(ids)

    def make_room(self, count: int) -> Iterator[EvictedRows]:
        """Forget what the policy does not keep, so that `count` more rows fit in the budget.

        And, behind an anchor, what the policy lets go though there is room.
        """
        flags = self.ledger.column("flags")
        if self._budget.compacts_at_anchors and len(flags) and flags[-1] & Flag.ANCHOR:
            rows = self._budget.settings.policy.reduce(self._held(protect_round=False))
            if rows is not None:
                yield self._drop_but(rows)
        if self.recalled > self.reserve:  # new pins have taken some of the reserve
            self.release()
        if self._budget.policy_rows + count > self._budget.policy_budget:
            yield self._keep(self._budget.policy_budget - count)

    def _compact_at_anchor(self) -> Iterator[EvictedRows]:
        if self._budget.compacts_at_anchors:
            yield from self.make_room(0)

    def open_turn(self, count: int, max_new_tokens: int, place: TurnRef) -> Iterator[EvictedRows]:
        """Make room for a user turn of `count` ids and its reply, where `evict` is "turn"."""
        self._round = place.round
        wanted = self._budget.policy_budget - count - max_new_tokens
        if (
            self._budget.settings.evict == "turn"
            and not self._budget.unbounded
            and self._budget.policy_rows > wanted
        ):
            num_keep = max(wanted, int(self._held().protected.sum()))
            if num_keep < self._budget.policy_rows:
                yield self._keep(num_keep)

    def close_round(self) -> None:
        """Apply the decay of the round that ends, to its own rows, too, if it is a fixed one."""
        decay, ledger = self._budget.settings.decay, self.ledger
        if decay is not None:
            ledger.close_round(decay)
        else:
            told = automatic_decay(ledger.column("surprisal"), ledger.column("round"))
            ledger.close_round(told, spared=self._round)

    def next_to_go(self, *, in_round: bool) -> NDArray[np.int64]:
        """Positions [k], ascending, that would leave if a block of room were needed now.

        `in_round` protects the round under way; else it is what the next one would push out. Empty
        while there is room for two blocks, or where nothing may leave.
        """
        held, budget_rules = self._held(protect_round=in_round), self._budget
        count = min(budget_rules.eviction_block, int((~held.protected).sum()))
        if (
            budget_rules.unbounded
            or not count
            or budget_rules.policy_rows + 2 * budget_rules.eviction_block
            <= budget_rules.policy_budget
        ):
            return np.zeros(0, np.int64)
        rows = budget_rules.settings.policy.keep(held, len(held) - count)
        leaves = np.ones(len(held), bool)
        leaves[rows.numpy()] = False
        return budget_rules.policy_positions[leaves]

    def switch(
        self, settings: CacheSettings, pins: int = 0
    ) -> Iterator[EvictedRows | RestoredRows]:
        """Change the settings; the cache then holds what the new ones choose from all there is.

        Settings as they were at the last forward pass bring back exactly what it saw. `pins` more
        rows are about to be pinned, and must fit too.

        Raises SettingError, changing nothing, when sinks and pins leave no room.
        """
        before, self._budget = self._budget, replace(self._budget, settings=settings)
        try:
            self.check_pins(pins)
            wanted = self._wanted(before.settings)
        except Exception:  # whatever the new policy raises
            self._budget = before
            raise
        self._last = self._last or (before.settings, self._held_now)
        if not self._budget.unbounded:
            self.cache.reserve(self.budget)
        moves = list(self._hold(wanted))
        self.cache.set_positions(in_stream=settings.in_stream)
        if (settings.archive, settings.folder) != (before.settings.archive, before.settings.folder):
            self.store.set_limit(settings.archive, settings.folder)
        if settings.recall is None or settings.recall.index == "off":
            self.store.archive.index = None
        yield from moves

    def pin(
        self, positions: NDArray[np.int64], pinned: bool
    ) -> Iterator[EvictedRows | RestoredRows]:
        """Pin rows that are held or archived, or let them go; then choose from all there is.

        Raises SettingError, changing nothing, when the pins would leave too little room.
        """
        flags = self.ledger.column("flags")[: self.ledger.seen].copy()
        if pinned:
            new = (flags[positions] & Flag.PINNED == 0) & (positions >= self._budget.sinks)
            self.check_pins(int(new.sum()))
        self.ledger.pin(positions, pinned)
        try:
            chosen = self._choice()
        except Exception:  # whatever a policy raises
            self.ledger.column("flags")[:] = flags
            raise
        self._last = None
        yield from self._hold(chosen)

    def _wanted(self, before: CacheSettings) -> Selection:
        """What is to be held after a switch."""
        now, last = self._budget.settings, self._last
        if last is not None and last[0] == now and self.store.has(last[1].held):
            return last[1]
        same = (before.policy, before.budget, before.sinks) == (now.policy, now.budget, now.sinks)
        fits = (
            self._budget.policy_rows <= self._budget.policy_budget and self.recalled <= self.reserve
        )
        if same and fits and (before.recall is None) == (now.recall is None):
            return self._held_now
        return self._choice()

    @property
    def _held_now(self) -> Selection:
        ledger = self.ledger
        return Selection(ledger.held_positions.copy(), ledger.recalled, self._layers)

    def _choice(self) -> Selection:
        """What the policy keeps of everything that is held or archived; the reserve is empty."""
        reachable = self.store.reachable()
        if self._budget.compacts_at_anchors:
            view = self._budget.view(reachable, None)
            rows = self._budget.settings.policy.reduce(view)
            reachable = reachable if rows is None else reachable[rows.numpy()]
        if len(reachable) <= self._budget.policy_budget:
            return Selection(reachable, _NONE)
        if self._budget.unbounded:  # not all of it fits: go on from what is held
            self.require(0)
            return Selection(self.ledger.held_positions.copy(), _NONE)
        view = self._budget.view(reachable, self._round)
        return Selection(
            reachable[self._budget.choose(view, self._budget.policy_budget).numpy()], _NONE
        )

    def _hold(self, choice: Selection) -> Iterator[EvictedRows | RestoredRows]:
        gone, came = _NONE, _NONE
        if not np.array_equal(choice.held, self.ledger.held_positions):
            gone, came = self.store.hold(choice.held)
            self._layers = ()
        self.ledger.recall(choice.recalled)
        self._insert(choice.layers)
        if len(gone):
            yield EvictedRows(gone, self.resident, self.ledger.seen)
        if len(came):
            yield RestoredRows(came, self.resident, self.ledger.seen)

    def _insert(self, layers: tuple[NDArray[np.int64], ...]) -> None:
        """Let each layer have its own rows in the reserve, after the sinks."""
        if layers is self._layers:
            return
        self._layers = layers
        if layers:
            self.store.insert(int((self.ledger.held_positions < self._budget.sinks).sum()), layers)
        else:
            self.cache.remove_inserted()

    def checkpoint(self) -> EngineCheckpoint:
        """The present moment, at the beginning of a turn, to come back to."""
        return EngineCheckpoint(self.store.checkpoint(), self.logits, self._round, self._held_now)

    def undo(self, to: EngineCheckpoint) -> None:
        """Go back: what was read or generated since has never been. The settings stay.

        What is held then is chosen anew, if the settings are others now. Raises LookupError,
        changing nothing, when a row that was held then can't be had any more.
        """
        self.cache.reserve(len(to.checkpoint.held))
        self.store.undo(to.checkpoint)
        self._layers = ()
        self.ledger.recall(to.choice.recalled)
        with suppress(LookupError):  # what a layer had for itself may be gone by now
            self._insert(to.choice.layers)
        self._reader.logits, self._round, self._last = to.logits, to.round, None
        if self.recalled > self.reserve or self._budget.policy_rows > self._budget.policy_budget:
            list(self._hold(self._choice()))

    def bring(self, found: SearchResult) -> None:
        """Fill the reserve with what was found; what was there for the last round leaves."""
        recall, policy_rows = self._budget.settings.recall, self._budget.policy_positions
        if recall is None:
            return
        one = partial(choose, positions=found.positions, n=self.reserve, span=recall.span)
        if found.layers is None:
            chosen = one(found.scores)
            list(self._hold(Selection(np.union1d(policy_rows, chosen), chosen)))
        else:
            layers = tuple(one(scores) for scores in found.layers)
            list(
                self._hold(
                    Selection(
                        self._budget.policy_positions, _NONE, layers if len(layers[0]) else ()
                    )
                )
            )

    def release(self) -> None:
        """Empty the reserve."""
        if self.recalled:
            list(self._hold(Selection(self._budget.policy_positions, _NONE)))

    def save(self) -> EngineState:
        """All that a conversation needs to go on elsewhere, but keys and values."""
        ledger, logits = self.ledger, self.logits
        return EngineState(
            rows=ledger.rows(),
            held=ledger.held_positions.copy(),
            log_decay=ledger.log_decay,
            unknown_surprisal=ledger.unknown_surprisal,
            logits=None if logits is None else logits.float().cpu().numpy(),
            round=self._round,
            recalled=ledger.recalled.copy(),
        )

    def load(
        self,
        saved: EngineState,
        rows: Rows | None,
        device: torch.device,
        received: AttentionCheckpoint | None = None,
    ) -> None:
        """Go on where another engine was; `rows` are keys and values of all that is held.

        `received` is the attention that was counted for them.
        Without them, or where some are missing, the held ids are read anew, one behind the other.
        """
        self.ledger.load(saved.rows, saved.held, saved.log_decay, saved.recalled)
        self.ledger.unknown_surprisal, self._round = saved.unknown_surprisal, saved.round
        self._reader.logits = None if saved.logits is None else torch.from_numpy(saved.logits)
        if rows is not None and np.isin(saved.held, rows.positions).all():
            self.store.load(rows, device)
            if received is not None:
                self.ledger.attention.load(received)
        else:
            self._reader.read_again(self._held_ids(), saved.held, self._budget.settings.counting)

    def forget(self, positions: NDArray[np.int64]) -> None:
        """Let these rows go for good, wherever they are, with all that is known of them."""
        self.store.forget(positions)
        self._layers = ()
        self.ledger.erase(positions)
        self._last = None

    def check_pins(self, more: int) -> None:
        """Raise SettingError when the pins and `more` rows would leave too little room."""
        if not self._budget.unbounded:
            self._budget.check_pins(self.store.reachable(), more)

    def require(self, count: int) -> None:
        """Raise ContextFullError when `count` more rows do not fit and nothing may be forgotten."""
        if self._budget.unbounded and self.resident + count > self.budget:
            self._budget.settings.policy.keep(self._held(), self.budget - count)
        if self.cache.in_stream and self.ledger.seen + count > self._model.context_length:
            raise ContextFullError(
                f"the model's context is full: {self.ledger.seen} tokens read, and positions are "
                "those of the stream",
                hint="/set positions cache goes on",
            )

    def view(self, at: NDArray[np.int64]) -> HeldRows:
        """The rows at stream positions [n], ascending, held or not, as a policy sees them."""
        return self._budget.view(at, None)

    def _held(self, *, protect_round: bool = True) -> HeldRows:
        return self._budget.view(
            self._budget.policy_positions, self._round if protect_round else None
        )

    def _keep(self, num_keep: int) -> EvictedRows:
        """Forget all but `num_keep` rows, and what is in the reserve."""
        return self._drop_but(self._budget.choose(self._held(), num_keep))

    def _drop_but(self, rows: Tensor) -> EvictedRows:
        """Forget all but these rows [k] of the policy's, and what is in the reserve."""
        if len(self.ledger.recalled):
            stays = np.union1d(self._budget.policy_positions[rows.numpy()], self.ledger.recalled)
            rows = torch.from_numpy(np.searchsorted(self.ledger.held_positions, stays))
        gone = self.store.keep(rows)
        return EvictedRows(gone, self.resident, self.ledger.seen)

    def _held_ids(self) -> list[int]:
        ids: list[int] = self.ledger.column("token_id")[self.ledger.held_positions].tolist()
        return ids

    def _chunk(
        self, ids: Sequence[int], roles: Sequence[Role], place: TurnRef, pinned: bool = False
    ) -> Chunk:
        policy_budget = int(Flag.PINNED) if pinned else 0
        flags = [policy_budget | (Flag.ANCHOR if self._ends_sequence(i) else 0) for i in ids]
        return Chunk(ids, roles, flags, place)

    def _read(self, chunk: Chunk) -> None:
        if self._budget.unbounded and self.resident + len(chunk) > self.cache.capacity:
            wanted = max(2 * self.cache.capacity, self.resident + len(chunk))
            self.cache.reserve(min(self.budget, wanted))
        self._last = None
        sequence = self._budget.sequence if self._budget.compacts_at_anchors else None
        self._reader.read(chunk, sequence, self._budget.settings.counting)
