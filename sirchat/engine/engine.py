"""The engine: reads token ids, and keeps the KV cache within its budget.

While a turn is read, tokens are evicted before each chunk of at most E/4 ids. While a reply is
generated, a block of tokens is evicted whenever the cache is full. E is explained in `budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.evictor import Evictor
from sirchat.engine.policy_choice import Division, PolicyChoice
from sirchat.engine.reader import Reader
from sirchat.engine.recalled_tokens import RecalledTokens
from sirchat.engine.switching import Switcher
from sirchat.engine.types import (
    CacheSettings,
    EngineCheckpoint,
    EngineState,
    NewTokens,
    ReadProgress,
    TurnRef,
)
from sirchat.errors import ContextFullError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.memory.placement import EvictedRows, Moves
from sirchat.models.model import LoadedModel

# Ids in a pass that reads several chunks. Ctrl-C is handled only between passes.
_MAX_PASS_IDS = 1024
_REBUILD_PASS_IDS = 256  # ids in a pass that computes recurrent states again
_ANCHOR, _CONTINUES = int(Flag.ANCHOR), int(Flag.CONTINUES)


class Engine:
    """Reads the token ids of one conversation; owns its KV cache and its ledger.

    `ends_sequence(id)` marks the anchors of the policy `anchor`. `continues_word(previous, id)`
    tells whether both ids belong to one word. Callers may read `ledger`, `cache` and `store`, and
    may use `choice`, `recalled`, `evictor` and `switcher`, which move tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: CacheSettings,
        *,
        seed: int = 0,
        ends_sequence: Callable[[int], bool] = lambda token_id: False,
        continues_word: Callable[[int, int], bool] = lambda previous, token_id: False,
    ) -> None:
        self._model = model
        self._ends_sequence = ends_sequence
        self._continues_word = continues_word
        self._uniform_surprisal = math.log(model.vocab_size)  # of a token if all are equally likely
        self.ledger = Ledger(seed, unknown_surprisal=self._uniform_surprisal)
        is_bounded = settings.policy.bounded
        self.cache = model.new_cache(
            settings.budget if is_bounded else min(model.context_length, 1024)
        )
        self.cache.set_positions(absolute_positions=settings.absolute_positions)
        self.store = KeyValueStore(self.cache, self.ledger, settings.archive, settings.folder)
        self.reader = Reader(model, self.cache, self.ledger)
        self.choice = PolicyChoice(settings, model.context_length, self.store)
        self.recalled = RecalledTokens(self.choice, self.reader)
        self.evictor = Evictor(self.choice, self.recalled)
        self.switcher = Switcher(self.choice, self.recalled)

    @property
    def settings(self) -> CacheSettings:
        return self.choice.settings

    @property
    def budget(self) -> int:
        """The most tokens in the cache: the context length if the policy never evicts."""
        settings = self.settings
        return settings.budget if settings.policy.bounded else self._model.context_length

    @property
    def resident(self) -> int:
        return self.cache.length

    @property
    def logits(self) -> Tensor | None:
        """Raw logits [V] for the next token; None before the first token."""
        return self.reader.logits

    def prefill(
        self, ids: Sequence[int], roles: Sequence[Role], ref: TurnRef, *, pinned: bool = False
    ) -> Iterator[ReadProgress | EvictedRows]:
        """Read `ids` [m] of turn `ref`, with the role of each; yields evictions and progress.

        The engine is consistent at every yield, so callers may stop there. Raises ContextFullError,
        before any id is read, if the ids do not fit and nothing may be evicted.
        """
        evictor, ledger, compacts = self.evictor, self.ledger, self._compacts_at_anchors
        self.choice.round = ref.round
        self.require_room(len(ids))
        turn = NewTokens(ids, roles, self.flags_of(ids, pinned), ref)
        stats = self.settings.attention_stats
        done = 0
        while done < len(ids):
            division = self.choice.divide_budget()
            end = min(len(ids), done + self._pass_size(division, pinned))
            if compacts:  # a chunk ends right after an anchor
                ends = (i + 1 for i in range(done, end) if turn.flags[i] & _ANCHOR)
                end = next(ends, end)
            yield from evictor.make_room(end - done)
            is_first = not ledger.seen
            self.grow_for(end - done)
            self.reader.read(turn.part(done, end), stats, division.sinks if compacts else None)
            if is_first:
                ledger.set_first_surprisal(min(division.chunk_size, end))
            done = end
            if compacts:
                yield from evictor.make_room(0)
            yield ReadProgress(done, len(ids))

    def decay_at_round_end(self) -> None:
        self.ledger.apply_decay(self.settings.decay)

    def checkpoint(self) -> EngineCheckpoint:
        """The state at the beginning of a turn, to which `undo` can return."""
        return EngineCheckpoint(self.store.checkpoint(), self.logits, self.choice.round)

    def undo(self, to: EngineCheckpoint, *, keep_pins: bool = False) -> Moves:
        """Undo all reading and pinning since the checkpoint `to`; the current settings stay.

        Returns the tokens moved because settings, or pins kept by `keep_pins`, have changed since.
        Raises LostTokensError, changing nothing, if a token of the checkpoint is lost.
        """
        ledger, pinned = self.ledger, to.cache.pinned
        self.cache.grow_to(len(to.cache.placement.held))
        self.store.undo(to.cache)
        self.choice.round, self.reader.logits = to.round, to.logits
        if not ledger.seen:
            ledger.unknown_surprisal = self._uniform_surprisal
        if keep_pins:  # and pin again the rules that were unpinned since
            ledger.pin(pinned[ledger.column("flags")[pinned] & np.uint8(Flag.RULE) != 0], True)
        else:
            ledger.pin_only(pinned)
            for rule in to.cache.rules:
                ledger.flag(Flag.RULE, rule, True)
        return self.switcher.choose_unless_valid()

    def erase(self, positions: Positions) -> None:
        """Delete the tokens at these stream positions from cache, archive, ledger and states."""
        self.store.erase(positions)
        self.ledger.erase(positions)
        self.rebuild_state()

    def reorder(self, order: Positions, turns: Positions, rounds: Positions) -> Positions:
        """Put the tokens into the order `order`, and erase all others; see `Ledger.reorder`.

        Nothing is read again. If the last token changes, the logits for the next token are dropped.
        """
        is_last = not len(order) or int(order[-1]) == self.ledger.seen - 1
        rank = self.store.reorder(order, turns, rounds)
        if not is_last:
            self.reader.logits = None
        self.choice.round = int(rounds.max(initial=0))
        return rank

    def rebuild_state(self) -> None:
        """Compute the state of recurrent and convolution layers again, without erased tokens.

        The whole stream is read into a temporary cache of sinks and newest tokens. The keys and
        values of the conversation stay as they are.
        """
        if not self.cache.has_state:
            return
        self.cache.state = ()
        is_absolute, total = self.cache.absolute_positions, self.budget
        flags = self.ledger.column("flags")
        positions = np.flatnonzero(flags & np.uint8(Flag.ERASED) == 0)
        sinks = min(self.settings.honoured_sinks, total // 2)
        size = 1 if self.cache.reads_singly else max(1, min(total // 4, _REBUILD_PASS_IDS))
        cache = self._model.new_cache(min(total, len(positions)))
        cache.set_positions(absolute_positions=is_absolute)
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            leaving = max(0, cache.length + len(part) - total)  # after the sinks
            slots = torch.arange(cache.length)
            cache.keep(slots[(slots < sinks) | (slots >= sinks + leaving)])
            ids = self.ledger.column("token_id")[part].tolist()
            self._model.read(ids, cache, positions=part.tolist() if is_absolute else None)
            cache.commit(len(part), part)
        self.cache.state = cache.state

    def save(self, start: int = 0) -> EngineState:
        """The saved state without keys and values; ledger rows from stream position `start` on."""
        ledger, logits = self.ledger, self.logits
        return EngineState(
            rows=ledger.rows(start),
            held=self.recalled.held_at_end(),
            log_decay=ledger.log_decay,
            unknown_surprisal=ledger.unknown_surprisal,
            logits=None if logits is None else logits.float().cpu().numpy(),
            round=self.choice.round,
            state=self.cache.state,
        )

    def load(
        self,
        saved: EngineState,
        rows: KeyValues | None,
        attention: AttentionCheckpoint | None = None,
        evicted: Iterable[KeyValues] = (),
    ) -> None:
        """Continue a saved conversation, with its keys and values `rows` and their `attention`.

        `evicted` goes to the archive. Keys and values are computed again if `rows` lacks a held
        token; the state of recurrent and convolution layers is, if it was not saved.
        """
        ledger, reader = self.ledger, self.reader
        ledger.load(saved.rows, saved.held, saved.log_decay)
        ledger.unknown_surprisal, self.choice.round = saved.unknown_surprisal, saved.round
        reader.logits = None if saved.logits is None else torch.from_numpy(saved.logits)
        tiers = None
        if rows is not None and np.isin(saved.held, rows.positions).all():
            self.store.load(rows)
            tiers = rows.tiers
            if attention is not None:
                ledger.attention.load(attention)
        else:
            ids = ledger.column("token_id")[ledger.held_positions].tolist()
            reader.read_again(ids, saved.held, self.settings.attention_stats)
        self.store.load_evicted(evicted, tiers)
        if saved.state:
            self.cache.state = saved.state
        else:
            self.rebuild_state()

    def require_room(self, count: int) -> None:
        """Raise ContextFullError if the model's context has no room for `count` more tokens.

        The context can be full only if the policy never evicts, or with absolute positions.
        """
        policy, most = self.settings.policy, self._model.context_length
        if not policy.bounded and self.cache.length + count > most:
            policy.keep(
                self.choice.view(self.ledger.held_positions), most - count
            )  # raises, in its own words
        if self.cache.absolute_positions and self.ledger.seen + count > most:
            raise ContextFullError(
                f"the model's context is full: {self.ledger.seen} tokens read, and with positions "
                "stream, evicted tokens count, too",
                hint="/set positions cache lets the chat go on",
            )

    def flags_of(self, ids: Sequence[int], pinned: bool = False) -> list[int]:
        """The ledger flags of `ids` [m], which are read next."""
        flags = [int(Flag.PINNED) if pinned else 0] * len(ids)
        previous = int(self.ledger.column("token_id")[-1]) if self.ledger.seen else None
        for index, token_id in enumerate(ids):
            if self._ends_sequence(token_id):
                flags[index] |= _ANCHOR
            if previous is not None and self._continues_word(previous, token_id):
                flags[index] |= _CONTINUES
            previous = token_id
        return flags

    def grow_for(self, count: int) -> None:
        """Enlarge the buffers of the cache, if necessary, for `count` more rows."""
        cursor = self.cache.cursor
        needed = cursor.length + count
        if needed > cursor.capacity:  # the budget is no hard bound
            most = self.choice.divide_budget().hard_bound
            self.cache.grow_to(min(most, max(2 * cursor.capacity, needed)))

    @property
    def _compacts_at_anchors(self) -> bool:
        return self.settings.policy.compacts_at_anchors

    def _pass_size(self, division: Division, pinned: bool) -> int:
        """Most ids of a turn that one pass reads: as many whole chunks as fit, at least one."""
        # Several chunks in one pass are faster, and the same tokens are evicted.
        size = division.chunk_size
        if pinned or self._compacts_at_anchors:  # pins change the size of the next chunk
            return size
        free = min(division.hard_bound - self.cache.length, _MAX_PASS_IDS)
        return size * max(1, free // size)
