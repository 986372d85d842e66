"""The engine: reads and generates token ids, and keeps the KV cache within its budget.

While a turn is read, tokens are evicted before each chunk of at most E/4 ids. While a reply is
generated, a block of tokens is evicted whenever the cache is full. E is explained in `eviction`.
One step adds a token to each of several replies, of one conversation or of several.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.eviction import Division, Evictor, PolicyChoice
from sirchat.engine.reader import Reader
from sirchat.engine.sampling import Sampler
from sirchat.engine.switching import Switcher
from sirchat.engine.types import (
    CacheSettings,
    EngineState,
    GeneratedToken,
    NewTokens,
    ReadProgress,
    Stopped,
    TurnRef,
)
from sirchat.errors import ContextFullError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.key_value_store import Checkpoint, KeyValueStore
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import Flag, Ledger, MovedRows, Role
from sirchat.models.captured_step import ChosenToken
from sirchat.models.encoder import EncoderOutput
from sirchat.models.model import LoadedModel

# Ids in a pass that reads several chunks on a CPU. Ctrl-C is handled only between passes.
_MAX_CHUNKED_IDS = 1024
_REBUILD_PASS_IDS = 256  # ids in a pass that computes recurrent states again
_ANCHOR, _CONTINUES = int(Flag.ANCHOR), int(Flag.CONTINUES)

# Of guesses of next tokens, see `PromptLookup`
_SHORT_MATCH = 3  # how many newest tokens must have occurred before, if the last guess was right
_LONG_MATCH = 8  # how many at the start, and if the last guess was wrong
_SEARCHED_TOKENS = 2**14  # newest tokens that are searched
_SHORT_GUESS, _LONG_GUESS = 5, 15  # tokens guessed after a short and after a long match
_MIN_USEFUL_TOKENS = 3  # minimum number of right tokens with which the larger pass saves time
_MAX_PAUSE = 256  # maximum number of tokens for which nothing is guessed

_LOG = logging.getLogger(__name__)


class Engine:
    """Reads the token ids of one conversation; owns its KV cache and its ledger.

    `ends_sequence(id)` marks the anchors of the policy `anchor`. `continues_word(previous, id)`
    tells whether both ids belong to one word. Callers may read `ledger`, `cache` and `store`, and
    may use `choice`, `evictor` and `switcher`, which move tokens.
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
        self.evictor = Evictor(self.choice, self.reader)
        self.switcher = Switcher(self.choice, self.evictor)

    @property
    def settings(self) -> CacheSettings:
        return self.choice.settings

    @property
    def budget(self) -> int:
        """The budget in tokens; the context length if the policy never evicts."""
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
    ) -> Iterator[ReadProgress | MovedRows]:
        """Read `ids` [m] of turn `ref`, with the role of each; yields evictions and progress.

        The engine is consistent at every yield, so callers may stop there. Raises ContextFullError,
        before any id is read, if the ids do not fit and nothing may be evicted.
        """
        evictor, ledger = self.evictor, self.ledger
        compacts = self.settings.policy.compacts_at_anchors
        self.choice.round = ref.round
        self.require_room(len(ids))
        turn = NewTokens(ids, roles, self.flags_of(ids, pinned), ref)
        stats = self.settings.attention_stats
        done = 0
        while done < len(ids):
            division = self.choice.divide_budget()
            end = min(len(ids), done + self._pass_size(division, len(ids) - done, pinned))
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

    def checkpoint(self) -> Checkpoint:
        """The state at the beginning of a turn, to which `undo` can return."""
        return replace(self.store.checkpoint(), logits=self.logits, round=self.choice.round)

    def undo(self, to: Checkpoint, *, keep_pins: bool = False) -> None:
        """Undo all reading and, without `keep_pins`, pinning since the checkpoint `to`.

        The current settings stay; where they differ, `Switcher.choose_unless_valid` must follow.
        Raises LostTokensError, changing nothing, if a token of the checkpoint is lost.
        """
        ledger, pinned = self.ledger, to.pinned
        self.cache.grow_to(len(to.placement.held))
        self.store.undo(to)
        self.choice.round = to.round
        self.reader.set_logits(to.logits)
        if not ledger.seen:
            ledger.unknown_surprisal = self._uniform_surprisal
        if keep_pins:  # and pin again the rules that were unpinned since
            ledger.pin(pinned[ledger.column("flags")[pinned] & np.uint8(Flag.RULE) != 0], True)
        else:
            ledger.pin_only(pinned)
            for rule in to.rules:
                ledger.flag(Flag.RULE, rule, True)

    def erase(self, positions: Positions) -> None:
        """Delete the tokens at these stream positions from cache, archive, ledger and states."""
        self.rebuild_state(positions)  # first, as this takes long and may be interrupted
        self.store.erase(positions)
        self.ledger.erase(positions)

    def reorder(self, order: Positions, turns: Positions, rounds: Positions) -> Positions:
        """Put the tokens into the order `order`, and erase all others; see `Ledger.reorder`.

        Nothing is read again. If the last token changes, the logits for the next token are dropped.
        """
        is_last = not len(order) or int(order[-1]) == self.ledger.seen - 1
        rank = self.store.reorder(order, turns, rounds)
        if not is_last:
            self.reader.set_logits(None)
        self.choice.round = int(rounds.max(initial=0))
        return rank

    def rebuild_state(self, erased: Positions | None = None) -> None:
        """Compute the state of recurrent and convolution layers again, without erased tokens.

        Those at `erased` are erased next. The whole stream is read into a temporary cache of sinks
        and newest tokens. The keys and values of the conversation stay as they are.
        """
        if not self.cache.has_state:
            return
        is_absolute, total = self.cache.absolute_positions, self.budget
        flags = self.ledger.column("flags")
        positions = np.flatnonzero(flags & np.uint8(Flag.ERASED) == 0)
        if erased is not None:
            positions = np.setdiff1d(positions, erased)
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
            held=self.evictor.held_at_end(),
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
    ) -> None:
        """Continue a saved conversation, with its keys and values `rows` and their `attention`.

        Keys and values are computed again if `rows` lacks a held
        token; the state of recurrent and convolution layers is, if it was not saved.
        """
        ledger, reader = self.ledger, self.reader
        ledger.load(saved.rows, saved.held, saved.log_decay)
        ledger.unknown_surprisal, self.choice.round = saved.unknown_surprisal, saved.round
        reader.set_logits(None if saved.logits is None else torch.from_numpy(saved.logits))
        if rows is not None and np.isin(saved.held, rows.positions).all():
            self.store.load(rows)
            if attention is not None:
                ledger.attention.load(attention)
        else:
            ids = ledger.column("token_id")[ledger.held_positions].tolist()
            reader.read_again(ids, saved.held, self.settings.attention_stats)
        if saved.state:
            self.cache.state = saved.state
        else:
            self.rebuild_state()

    def require_room(self, count: int, held: int | None = None, seen: int | None = None) -> None:
        """Raise ContextFullError if the model's context has no room for `count` more tokens.

        `held` tokens will be held, and `seen` read, by then; by default as many as now. The context
        can be full only if the policy never evicts, or with absolute positions.
        """
        policy, most = self.settings.policy, self._model.context_length
        held = self.cache.length if held is None else held
        seen = self.ledger.seen if seen is None else seen
        if not policy.bounded and held + count > most:
            # It raises, in its own words.
            policy.keep(self.choice.view(self.ledger.held_positions), most - count)
        if self.cache.absolute_positions and seen + count > most:
            raise ContextFullError(
                f"the model's context is full: {seen} tokens read, and with positions "
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

    def _pass_size(self, division: Division, count: int, pinned: bool) -> int:
        """Most of `count` ids that one pass reads: as many whole chunks as fit, at least one."""
        # Several chunks in one pass are faster, and the same tokens are evicted.
        size, room = division.chunk_size, division.hard_bound - self.cache.length
        compacts = self.settings.policy.compacts_at_anchors
        if self.reader.is_on_gpu and count <= room and not compacts:
            return self.reader.pass_size(count, is_observed=False)
        if pinned or compacts:
            return size  # pins change the size of the next chunk
        free = min(room, self.reader.max_pass_ids if self.reader.is_on_gpu else _MAX_CHUNKED_IDS)
        return size * max(1, free // size)


class StepResult(NamedTuple):
    """What one step did for one reply: evictions, then at most one token, and the end, if any."""

    records: Sequence[GeneratedToken | MovedRows | Stopped]
    error: Exception | None = None  # what failed after these records
    seconds: float = 0.0  # that the step took


def step(replies: Sequence[Generation]) -> list[StepResult]:
    """Choose the next token of each reply, and read the tokens of all replies in one pass.

    An error of one reply is in its `StepResult`, and does not stop the others.
    """
    start, is_alone = time.perf_counter(), len(replies) == 1
    errors = list[Exception | None]()
    for reply in replies:
        errors.append(None)
        try:
            reply.choose(alone=is_alone)
        except Exception as error:  # whatever a sampler or a policy raises
            errors[-1] = error
    if not is_alone:
        _read_together([reply for reply in replies if reply.can_share_pass])
    for index, reply in enumerate(replies):
        try:
            reply.read_chosen()
        except Exception as error:  # whatever a model raises
            errors[index] = error
    seconds = time.perf_counter() - start
    return [
        StepResult(reply.records, error, seconds)
        for reply, error in zip(replies, errors, strict=True)
    ]


def _read_together(replies: Sequence[Generation]) -> None:
    """Precompute the logits after all chosen tokens in one pass; if that fails, do nothing."""
    model = replies[0].reader.model if len(replies) > 1 else None
    if model is None or model.decode_step is None:
        return
    readers = [reply.reader for reply in replies]
    try:
        logits, states = model.decode_step.read_together(
            [(one.chosen_id, one.reader.rotary_position, one.reader.cache) for one in replies]
        )
        encoded = EncoderOutput(any(reader.ledger.token_vectors.wanted for reader in readers))
        model.encoder.fill(encoded, states)
        likeliest = ChosenToken.likeliest(logits)
        for index, (reply, token) in enumerate(zip(replies, likeliest, strict=True)):
            own = logits[index][None], encoded.of_token(index), token
            reply.reader.set_precomputed(reply.chosen_id, *own)
    except Exception as error:  # whatever a model raises
        _LOG.warning("tokens are read one by one: %s", type(error).__name__)


class Generation:
    """A reply that is generated between `begin` and `close`; `step` adds one token to it.

    `lookup` guesses tokens, which are then precomputed in one pass. A step fails with
    ContextFullError if nothing may be evicted and fewer than `closing_tokens` more ids fit.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        turn: TurnRef,
        *,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        closing_tokens: int = 0,
        lookup: PromptLookup | None = None,
    ) -> None:
        self.engine, self.reader, self.tokens_left = engine, engine.reader, max_new_tokens
        self._sampler, self._turn, self._stop_ids = sampler, turn, stop_ids
        self._closing_tokens, self._lookup = closing_tokens, lookup
        settings = engine.settings
        self._stats, self._compacts = settings.attention_stats, settings.policy.compacts_at_anchors
        # Where attention is recorded or anchors evict, nothing is computed in advance; nor with
        # recurrent layers, because a wrong guess can't be removed from their state.
        has_state = engine.cache.has_state
        self._may_look_ahead = self._stats is None and not self._compacts and not has_state
        self._is_bounded = settings.policy.bounded
        self._may_be_full = not self._is_bounded or engine.cache.absolute_positions
        self.chosen_id = -1  # the id to be read next, or -1
        self.records: list[GeneratedToken | MovedRows | Stopped] = []  # of the present step

    def begin(self) -> None:
        if self.engine.logits is None:
            raise RuntimeError("nothing has been read yet")
        self.engine.choice.round = self._turn.round
        self._division = self.engine.choice.divide_budget()
        self.reader.begin_reply(self._sampler if self._may_look_ahead else None)

    def close(self) -> None:
        """End the reply after its last token."""
        self.reader.end_reply()

    def __iter__(self) -> Iterator[GeneratedToken | MovedRows | Stopped]:
        """Generate the whole reply, and yield its records; raises the errors of its steps."""
        self.begin()
        try:
            while True:
                (done,) = step([self])
                yield from done.records
                if done.error is not None:
                    raise done.error
                if isinstance(done.records[-1], Stopped):
                    return
        finally:
            self.close()

    @property
    def can_share_pass(self) -> bool:
        """Whether the chosen token may be read in one pass with those of other conversations."""
        is_chosen = self.chosen_id >= 0
        return is_chosen and self._may_look_ahead and not self.reader.is_precomputed(self.chosen_id)

    def choose(self, *, alone: bool) -> None:
        """Choose the next token, and make room for it; if `alone`, a GPU may read it in advance."""
        reader, engine, cursor = self.reader, self.engine, self.engine.cache.cursor
        self.records = []
        self.chosen_id = -1
        if self.tokens_left <= 0:
            self.records.append(Stopped("length"))
            return
        is_full = self._is_bounded and cursor.length >= self._division.hard_bound
        may_read = alone and not is_full
        if self._may_be_full:
            end = engine.ledger.seen + 1 + self._closing_tokens
            may_read = may_read and end <= reader.model.context_length
        token_id = reader.choose(self._sampler, may_read=may_read)
        if token_id in self._stop_ids:
            self.records.append(Stopped("stop", token_id))
            return
        if self._may_be_full:
            engine.require_room(1 + self._closing_tokens)
        if is_full:
            self._division = division = engine.choice.divide_budget()
            self.records += engine.evictor.make_room(division.eviction_block)
        self.tokens_left -= 1
        lookup = self._lookup if self._may_look_ahead else None
        if lookup is not None and not reader.is_precomputed(token_id):
            self._look_ahead(lookup, token_id)
        if cursor.length == cursor.capacity:
            engine.grow_for(1)
        self.chosen_id = token_id

    def read_chosen(self) -> None:
        """Read the chosen token, unless the reply has ended."""
        token_id, engine = self.chosen_id, self.engine
        if token_id < 0:
            return
        new = NewTokens([token_id], [Role.ASSISTANT], engine.flags_of([token_id]), self._turn)
        sinks = self._division.sinks if self._compacts else None
        (surprisal,) = self.reader.read(new, self._stats, sinks)
        self.records.append(GeneratedToken(token_id, engine.ledger.seen - 1, surprisal))
        if self._compacts:
            self.records += engine.evictor.make_room(0)
            self._division = engine.choice.divide_budget()
        if not self.tokens_left:
            self.records.append(Stopped("length"))

    def _look_ahead(self, lookup: PromptLookup, token_id: int) -> None:
        """Precompute the logits after `token_id` and some guessed tokens, in one pass."""
        num_read = self.reader.drop_precomputed()
        if num_read is not None:
            lookup.learn(num_read - 1)
        engine, cursor = self.engine, self.engine.cache.cursor
        room = min(cursor.capacity, self._division.hard_bound) - cursor.length
        if engine.cache.absolute_positions:
            room = min(room, self.reader.model.context_length - engine.ledger.seen)
        ids = engine.ledger.column("token_id")
        if guess := lookup.guess(ids, token_id, min(self.tokens_left, room - 1)):
            with suppress(torch.OutOfMemoryError):  # the token is then read alone
                self.reader.precompute([token_id, *guess])


class PromptLookup:
    """Guesses the next tokens of one reply: those that followed the same text earlier.

    Guessing pauses after a wrong guess. The pause doubles with each further wrong one in a row.
    """

    def __init__(self) -> None:
        self._min_match = _LONG_MATCH
        self._pause = 0  # tokens for which nothing is guessed
        self._next_pause = 8

    def guess(self, ids: NDArray[Any], token_id: int, max_tokens: int) -> list[int]:
        """At most `max_tokens` ids that may follow the stream `ids` [seen] and then `token_id`."""
        if self._pause:
            self._pause -= 1
            return []
        if max_tokens < _MIN_USEFUL_TOKENS:
            return []
        recent = np.append(ids[-_SEARCHED_TOKENS:], token_id)
        match_end, length = _longest_match(recent)
        if length < self._min_match:
            return []
        count = min(max_tokens, _LONG_GUESS if length == _LONG_MATCH else _SHORT_GUESS)
        guessed: list[int] = recent[match_end : match_end + count].tolist()
        return guessed if len(guessed) >= _MIN_USEFUL_TOKENS else []

    def learn(self, num_right: int) -> None:
        """Adapt to the last guess, of which the first `num_right` tokens were right."""
        self._min_match = _SHORT_MATCH if num_right >= _MIN_USEFUL_TOKENS else _LONG_MATCH
        if num_right >= _MIN_USEFUL_TOKENS:
            self._next_pause = 8
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)


def _longest_match(ids: NDArray[Any]) -> tuple[int, int]:
    """End and length (3 to 8) of the longest earlier copy of the end of `ids`; (0, 0) if none."""
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    ends = ends[ends >= _SHORT_MATCH - 1]
    length, best = 1, 0
    while len(ends) and length < _LONG_MATCH:
        if length >= _SHORT_MATCH:
            best = int(ends[-1])
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[-1 - length]]
        if len(ends):
            length += 1
    if len(ends) and length >= _SHORT_MATCH:
        best = int(ends[-1])
    return (best + 1, length) if length >= _SHORT_MATCH else (0, 0)
