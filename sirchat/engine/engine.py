"""The engine: reads and generates token ids, and keeps the KV cache within its budget.

Let E be the number of cache rows (one per token) that the policy decides about: the budget without
sinks, pins and the rows reserved for recall. Ids are read in chunks of at most E/4, or less if the
policy gives less room to the newest tokens. Before a chunk is read, tokens are evicted to make room
for it. While tokens are generated, a block of rows is evicted whenever the cache is full. Therefore
the cache never has more rows than the budget after a forward pass, unless the setting `evict` is
`between-turns`. The logits after the last token read are stored; they predict the next token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.budget import Budget
from sirchat.engine.reader import CausalModel, Reader
from sirchat.engine.residency import CacheUpdate, Residency
from sirchat.engine.sampling import PromptLookup, Sampler
from sirchat.engine.types import (
    CacheSettings,
    EngineCheckpoint,
    EngineState,
    EvictedRows,
    Generated,
    GeneratedToken,
    PrefillChunk,
    ReadProgress,
    Stopped,
    TurnRef,
)
from sirchat.errors import ContextFullError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.memory.policies.scores import automatic_decay

_REBUILT_AT_ONCE = 256  # ids in one pass


class Engine:
    """Reads and generates the token ids of one conversation; owns its KV cache and its ledger.

    Attributes:
        ledger: the table of tokens: one row per token ever read.
        cache: the KV cache.
        store: moves keys and values between cache and archive.
        contents: decides which tokens the cache holds: evicts, changes settings, pins, erases.
        reader: runs forward passes; scores continuations.

    Args:
        model: the model that reads the ids.
        settings: policy, budget and so on; `contents.switch` changes them.
        seed: seed of the random numbers of tokens and policies.
        ends_sequence: returns whether an id ends a sequence, for the policy `anchor`.
        continues_word: called as (previous id, id), returns whether both belong to one word.
    """

    def __init__(
        self,
        model: CausalModel,
        settings: CacheSettings,
        *,
        seed: int = 0,
        ends_sequence: Callable[[int], bool] = lambda token_id: False,
        continues_word: Callable[[int, int], bool] = lambda previous, token_id: False,
    ) -> None:
        self._model = model
        self._ends_sequence = ends_sequence
        self._continues_word = continues_word
        self._no_surprisal = math.log(model.vocab_size)  # of a token if all are equally likely
        self.ledger = Ledger(seed, unknown_surprisal=self._no_surprisal)
        budget = Budget(settings, self.ledger, model.context_length)
        self.cache = model.new_cache(min(budget.total, 1024) if budget.unbounded else budget.total)
        self.cache.set_positions(absolute_positions=settings.absolute_positions)
        self.store = KeyValueStore(self.cache, self.ledger, settings.archive, settings.folder)
        self.residency = Residency(budget, self.cache, self.store)
        self.reader = Reader(model, self.cache, self.ledger)

    @property
    def settings(self) -> CacheSettings:
        """The settings in force of the KV cache, the eviction policy, the archive and recall."""
        return self.residency.budget.settings

    @property
    def budget(self) -> int:
        """Maximum number of tokens in the cache: the context length if the policy never evicts."""
        return self.residency.budget.total

    @property
    def resident(self) -> int:
        """Number of tokens in the cache now."""
        return self.cache.length

    @property
    def logits(self) -> Tensor | None:
        """Raw logits [V] for the next token; None before the first token."""
        return self.reader.logits

    def prefill(
        self, ids: Sequence[int], roles: Sequence[Role], at: TurnRef, *, pinned: bool = False
    ) -> Iterator[ReadProgress | EvictedRows]:
        """Read the ids of turn `at`; yields a record after each eviction and each part read.

        `roles` has the role of each id. If `pinned` is true, the tokens are protected from
        eviction. The engine is in a consistent state at every yield, so the caller may stop after
        any record. Raises ContextFullError, before any id is read, if the ids do not fit and
        nothing may be evicted.
        """
        self.residency.round = at.round
        self.require(len(ids))
        whole = self._chunk(ids, roles, at, pinned)
        done, budget = 0, self.residency.budget
        shared: AbstractContextManager[None] = nullcontext()
        if len(ids) > budget.max_prefill(pinned):
            shared = self._model.share_unpacked(len(ids) // budget.chunk_size)
        while done < len(ids):
            budget = self.residency.budget
            most = min(len(ids), done + budget.max_prefill(pinned))
            end = budget.end_at_anchor(whole.flags, done, most)
            yield from self.residency.make_room(end - done)
            with shared:  # not around a yield: another conversation may run then
                self._read(whole.part(done, end))
            done = end
            yield from self._compact_at_anchor()
            yield ReadProgress(done, len(ids))

    def generate(
        self,
        sampler: Sampler,
        at: TurnRef,
        *,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        closing: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
        lookup: PromptLookup | None = None,
        together: Callable[[], bool] = lambda: False,
    ) -> Iterator[Generated]:
        """Generate tokens; yields one record for each token, and one for each eviction.

        Generation ends at a stop id, after `max_new_tokens`, or when `interrupted` returns true;
        the last record, `Stopped`, gives the reason. If `lookup` is given, the tokens that it
        guesses are computed in advance, in one forward pass. While `together` returns true, a
        `ChosenToken` is yielded before each token that may be read in one pass with tokens of other
        conversations. Raises ContextFullError if nothing may be evicted and fewer than `closing`
        rows would stay free for the ids that end the turn.
        """
        self.residency.round = at.round
        self.reader.drop_ahead()
        for left in range(max_new_tokens, 0, -1):
            if interrupted():
                yield Stopped("interrupt")
                return
            if self.logits is None:
                raise RuntimeError("nothing has been read yet")
            token_id = sampler.pick(self.logits, self._said_ids, self.ledger.seen)
            if token_id in stop_ids:
                yield Stopped("stop", token_id)
                return
            self.require(1 + closing)
            budget = self.residency.budget
            if not budget.unbounded and budget.policy_rows >= budget.policy_bound:
                yield from self.residency.make_room(budget.eviction_block)
            if lookup is not None and self._may_look_ahead:
                self._look_ahead(lookup, token_id, left - 1)
            if together() and self._may_look_ahead and not self.reader.is_ahead(token_id):
                self._grow_for(1)
                yield self.reader.chosen(token_id)
            self._read(self._chunk([token_id], [Role.ASSISTANT], at))
            position = self.ledger.seen - 1
            surprisal = float(self.ledger.column("surprisal")[position])
            yield GeneratedToken(token_id, position, surprisal)
            yield from self._compact_at_anchor()
        yield Stopped("length")

    @property
    def _may_look_ahead(self) -> bool:
        """Whether guessed tokens may be computed in advance.

        False if attention is recorded, or if the policy evicts rows after each anchor (the end of a
        sentence or round). False, too, if the model has recurrent or convolution layers, because a
        wrong guess can't be removed from their state.
        """
        budget = self.residency.budget
        is_plain = self.settings.attention_stats is None and not self.cache.has_state
        return is_plain and not budget.compacts_at_anchors

    def _look_ahead(self, lookup: PromptLookup, token_id: int, most: int) -> None:
        """Compute the logits after `token_id` and after up to `most` guessed tokens, in one pass.

        `lookup` guesses the tokens. Nothing is computed if `lookup` guesses no token, or if the
        last guess already contains `token_id` as its next token.
        """
        if self.reader.is_ahead(token_id):
            return
        used = self.reader.drop_ahead()
        if used is not None:
            lookup.learn(used - 1)
        budget, cache = self.residency.budget, self.cache
        room = min(cache.capacity - cache.length, budget.policy_bound - budget.policy_rows)
        if cache.absolute_positions:
            room = min(room, self._model.context_length - self.ledger.seen)
        guess = lookup.guess(self.ledger.column("token_id"), token_id, min(most, room - 1))
        if guess:
            self.reader.look_ahead([token_id, *guess])

    def _compact_at_anchor(self) -> list[EvictedRows]:
        return self.residency.make_room(0) if self.residency.budget.compacts_at_anchors else []

    def close_round(self) -> None:
        """End a round: multiply the surprisal and the attention of tokens by the setting `decay`.

        A fixed decay applies to all tokens; the decay `auto` applies only to tokens of older
        rounds. Before that, a policy such as `kvzip` has the round's tokens in the cache read a
        second time.
        """
        decay, ledger = self.settings.decay, self.ledger
        layers = self.settings.policy.repeat_layers
        if layers is not None:
            in_round = ledger.column("round")[ledger.held_positions] == self.residency.round
            rows = torch.from_numpy(np.flatnonzero(in_round))
            self.reader.repeat(rows, layers, self.residency.budget.chunk_size)
        if decay is not None:
            ledger.close_round(decay)
        else:
            factor = automatic_decay(ledger.column("surprisal"), ledger.column("round"))
            ledger.close_round(factor, spared=self.residency.round)

    def checkpoint(self) -> EngineCheckpoint:
        """Return the engine's present state, to which `undo` can go back.

        Call this at the beginning of a turn.
        """
        selection = self.residency.selection
        return EngineCheckpoint(
            self.store.checkpoint(), self.logits, self.residency.round, selection
        )

    def undo(self, to: EngineCheckpoint, *, keep_pins: bool = False) -> CacheUpdate:
        """Go back to the checkpoint `to`: undo all that was read or pinned after it.

        The present settings stay. With `keep_pins`, the present pins stay pinned and in the cache,
        too. If the settings or pins differ from those at the checkpoint, the cache may get other
        rows than it held then; returns records of the rows evicted or restored for this reason.
        Raises LookupError, changing nothing, if a row that the cache held at the checkpoint is now
        neither in the cache nor in the archive.
        """
        moves = self.residency.undo(to.cache, to.selection, to.round, keep_pins=keep_pins)
        self.reader.logits = to.logits
        if not self.ledger.seen:
            self.ledger.unknown_surprisal = self._no_surprisal
        return moves

    def erase(self, positions: Positions) -> None:
        """Delete the tokens at these stream positions from the cache, the archive and the ledger.

        Then the state of recurrent and convolution layers is computed again without these tokens.
        """
        self.residency.erase(positions)
        self.rebuild_state()

    def rebuild_state(self) -> None:
        """Compute the state of recurrent and convolution layers again, without erased tokens.

        For this, the model reads the whole stream into another cache, which holds the sinks and the
        newest tokens, as many as the budget allows. The keys and values in the conversation's own
        cache do not change. Does nothing if the model has no such layers.
        """
        if not self.cache.has_state:
            return
        self.cache.state = ()
        flags, total = self.ledger.column("flags"), self.residency.budget.total
        stay = np.flatnonzero(flags & np.uint8(Flag.ERASED) == 0)
        sinks = min(self.residency.budget.sinks, total // 2)
        size = 1 if self.cache.reads_singly else max(1, min(total // 4, _REBUILT_AT_ONCE))
        cache = self._model.new_cache(min(total, len(stay)))
        cache.set_positions(absolute_positions=self.cache.absolute_positions)
        with self._model.share_unpacked(len(stay) // size):
            for start in range(0, len(stay), size):
                at = stay[start : start + size]
                leaving = max(0, cache.length + len(at) - total)  # rows to remove after the sinks
                slots = torch.arange(cache.length)
                cache.keep(slots[(slots < sinks) | (slots >= sinks + leaving)])
                ids, positions = self.ledger.column("token_id")[at].tolist(), at.tolist()
                self._model.read(
                    ids, cache, positions=positions if cache.absolute_positions else None
                )
                cache.commit(len(at), at)
        self.cache.state = cache.state

    def save(self) -> EngineState:
        """Return the state that a saved conversation needs to continue, except keys and values."""
        ledger, logits = self.ledger, self.logits
        return EngineState(
            rows=ledger.rows(),
            held=ledger.held_positions.copy(),
            log_decay=ledger.log_decay,
            unknown_surprisal=ledger.unknown_surprisal,
            logits=None if logits is None else logits.float().cpu().numpy(),
            round=self.residency.round,
            recalled=ledger.recalled.copy(),
            state=self.cache.state,
        )

    def load(
        self,
        saved: EngineState,
        rows: KeyValues | None,
        attention: AttentionCheckpoint | None = None,
    ) -> None:
        """Load a saved conversation, to continue it.

        Args:
            saved: state that `save` returned. If it has no state of recurrent and convolution
                layers, this state is computed again.
            rows: saved keys and values. If `rows` is None or lacks a token of the cache, keys and
                values are computed again by reading all ids of the cache.
            attention: statistics of the attention that the tokens of `rows` had received.
        """
        self.ledger.load(saved.rows, saved.held, saved.log_decay, saved.recalled)
        self.ledger.unknown_surprisal, self.residency.round = saved.unknown_surprisal, saved.round
        self.reader.logits = None if saved.logits is None else torch.from_numpy(saved.logits)
        if rows is not None and np.isin(saved.held, rows.positions).all():
            self.store.load(rows)
            if attention is not None:
                self.ledger.attention.load(attention)
        else:
            stats = self.settings.attention_stats
            self.reader.read_again(self._held_ids(), saved.held, stats)
        if saved.state:
            self.cache.state = saved.state
        else:
            self.rebuild_state()

    def require(self, count: int) -> None:
        """Raise ContextFullError if `count` more tokens can't be read.

        They can't be read if they do not fit in the cache and the policy never evicts. If keys are
        rotated to stream positions, they also can't be read if a position would exceed the model's
        context length.
        """
        self.residency.require(count)
        if self.cache.absolute_positions and self.ledger.seen + count > self._model.context_length:
            raise ContextFullError(
                f"the model's context is full: {self.ledger.seen} tokens read, and with positions "
                "stream, evicted tokens count, too",
                hint="/set positions cache lets the chat go on",
            )

    def _held_ids(self) -> list[int]:
        ids: list[int] = self.ledger.column("token_id")[self.ledger.held_positions].tolist()
        return ids

    def _said_ids(self, count: int) -> list[int]:
        """The newest `count` ids in the cache, leaving out ids of the chat template.

        If `count` is 0, returns all ids in the cache that are not of the chat template.
        """
        held = self.ledger.held_positions
        said = held[self.ledger.column("role")[held] != Role.TEMPLATE][-count:]
        ids: list[int] = self.ledger.column("token_id")[said].tolist()
        return ids

    def _chunk(
        self, ids: Sequence[int], roles: Sequence[Role], at: TurnRef, pinned: bool = False
    ) -> PrefillChunk:
        base = int(Flag.PINNED) if pinned else 0
        flags = [base | (Flag.ANCHOR if self._ends_sequence(i) else 0) for i in ids]
        before = self.ledger.column("token_id")[-1:].tolist()
        for at_id, pair in enumerate(pairwise([*before, *ids]), 1 - len(before)):
            if self._continues_word(*pair):
                flags[at_id] |= Flag.CONTINUES
        return PrefillChunk(ids, roles, flags, at)

    def _read(self, chunk: PrefillChunk) -> None:
        budget = self.residency.budget
        self._grow_for(len(chunk))
        self.residency.note_pass()
        opening = budget.chunk_size if self.ledger.seen == 0 else 0
        visible = budget.visible_to_anchor if budget.compacts_at_anchors else None
        self.reader.read(chunk, visible, self.settings.attention_stats)
        if opening:
            self.ledger.rank_first_token(min(opening, len(chunk)))

    def _grow_for(self, count: int) -> None:
        """Enlarge the cache's buffers, if necessary, so that `count` more rows fit."""
        if self.resident + count > self.cache.capacity:  # the budget is no hard bound
            wanted = max(2 * self.cache.capacity, self.resident + count)
            self.cache.grow_to(min(self.residency.budget.hard_bound, wanted))
