"""Generates replies, one token in a step. Several conversations share a step's forward pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

import torch

from sirchat.engine.engine import Engine
from sirchat.engine.prompt_lookup import PromptLookup
from sirchat.engine.sampling import Sampler
from sirchat.engine.types import GeneratedToken, NewTokens, Stopped, TurnRef
from sirchat.memory.ledger import Role
from sirchat.memory.placement import EvictedRows
from sirchat.models.captured_step import ChosenToken
from sirchat.models.encoder import EncoderOutput

_LOG = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """What one step did for one reply: evictions, then at most one token, and the end, if any."""

    records: Sequence[GeneratedToken | EvictedRows | Stopped]
    error: Exception | None = None  # what failed after these records
    seconds: float = 0.0  # that the step took


class Generation(AbstractContextManager["Generation"]):
    """Context manager: a reply that is being generated; `step` adds one token to it.

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
        self.records: list[GeneratedToken | EvictedRows | Stopped] = []  # of the present step

    def __enter__(self) -> Generation:
        if self.engine.logits is None:
            raise RuntimeError("nothing has been read yet")
        self.engine.choice.round = self._turn.round
        self._division = self.engine.choice.divide_budget()
        self.reader.begin_reply(self._sampler if self._may_look_ahead else None)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reply after its last token."""
        self.reader.end_reply()

    def __iter__(self) -> Iterator[GeneratedToken | EvictedRows | Stopped]:
        """Generate the whole reply, and yield its records; raises the errors of its steps."""
        with self:
            while True:
                (done,) = step([self])
                yield from done.records
                if done.error is not None:
                    raise done.error
                if isinstance(done.records[-1], Stopped):
                    return

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
