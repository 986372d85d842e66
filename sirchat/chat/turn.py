"""Lets the engine read or generate the ids of one turn, and yields the turn's events.

The chat template ends each turn with certain ids, which are *pending* until the engine has read
them. If an error cuts the turn off, the pending ids are read before the next turn, so that the chat
always follows its template.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Choosing, Delta, Event, Finish, Notice, Reading, TurnDone
from sirchat.chat.reasoning import reasoning
from sirchat.chat.state import ConversationState, TurnStats
from sirchat.engine.engine import Engine
from sirchat.engine.types import (
    ChosenToken,
    EvictedRows,
    Generated,
    GeneratedToken,
    ReadProgress,
    Stopped,
    TurnRef,
)
from sirchat.errors import ContextFullError
from sirchat.memory.ledger import Role
from sirchat.text.detokenizer import TextStream
from sirchat.text.template import TurnIds

Interrupted = Callable[[], bool]


class OpenTurn:
    """One turn, while it is read or generated.

    Args:
        now: the conversation that the turn belongs to.
        engine: reads and generates its ids.
        events: makes the events.
        stats: counts of this turn's tokens and seconds, which the methods increase.
        evicts_thinking: whether a reply's reasoning is evicted when the reply is complete.
    """

    def __init__(
        self,
        now: ConversationState,
        engine: Engine,
        events: EventBuilder,
        stats: TurnStats,
        evicts_thinking: bool = False,
    ) -> None:
        self._now = now
        self._engine = engine
        self._events = events
        self._evicts_thinking = evicts_thinking
        self.stats = stats
        self.ref = TurnRef(stats.index, now.round)

    def make_room(self, count: int, max_new_tokens: int) -> list[Event]:
        """Evict tokens before a user turn of `count` ids is read, as the setting `evict` says.

        Returns an event for each eviction.
        """
        records = self._engine.residency.make_room_for_turn(count, max_new_tokens, self.ref)
        return [self._evicted(record) for record in records]

    def read(
        self,
        turn: TurnIds,
        interrupted: Interrupted = lambda: False,
        *,
        pinned: bool = False,
        after: Sequence[int] = (),
    ) -> Iterator[Event]:
        """Let the engine read the ids of `turn`; yields events of progress and evictions.

        If `interrupted` returns true, the ids of the text that are not read yet are skipped, and
        only the template's ids after the text are read. `after` are ids that the caller reads later
        in this round; if the reading of `turn` fails, they become pending, too.
        """
        done, end = 0, len(turn.ids)
        self._note_pending(turn, done, after)
        while done < end:
            ids, roles = turn.ids[done:], turn.roles[done:]
            records = self._engine.prefill(ids, roles, self.ref, pinned=pinned)
            begun, skip = done, False
            while not skip:
                start = time.perf_counter()
                record = next(records, None)
                self.stats.seconds_prefill += time.perf_counter() - start
                if record is None:
                    break
                if isinstance(record, ReadProgress):
                    self.stats.tokens_in += begun + record.done - done
                    done = begun + record.done
                    self._note_pending(turn, done, after)
                    yield Reading(done, end)
                    skip = interrupted() and turn.content[0] <= done < turn.content[1]
                else:
                    yield self._evicted(record)
            if skip:
                done, self.stats.finish = turn.content[1], "interrupt"

    def answer(
        self,
        records: Iterator[Generated],
        stream: TextStream,
        closing: Sequence[int],
        end_ids: Collection[int],
    ) -> Iterator[Event]:
        """Yield the events of a reply while it is generated, then read the `closing` ids after it.

        `records` are what the engine generates. If the stop id that ends the reply is not one of
        the `end_ids`, the reply has ended at a control token. If an error cuts the reply off, its
        text until then is stored, and the `closing` ids are read before the next turn.
        """
        said: list[str] = []
        self._now.reply, self._now.pending_ids = self.stats, list(closing)
        self.stats.finish = "interrupt"  # not changed if the caller stops taking events
        failure: ContextFullError | None = None
        try:
            try:
                yield from self._generated(records, stream, said, end_ids)
            except ContextFullError as error:
                self.stats.finish, failure = "context", error
            closed = self.close(closing)
        except BaseException:  # the caller stopped taking events, or the model failed
            self._now.finish(self.stats, "".join(said))
            raise
        yield from closed
        yield self.done("".join(said))
        yield from self._events.problems()
        if failure is not None:
            yield Notice(str(failure))

    def ending_as(self, records: Iterator[Generated], finish: Finish) -> Iterator[Generated]:
        """Yield the engine's records of a reply whose known tokens are read again.

        The record of the reply's end is left out: `finish` is the reason why the reply ended when
        it was first generated, and is stored instead.
        """
        for record in records:
            if isinstance(record, Stopped):
                self.stats.finish = finish
            else:
                yield record

    def _generated(
        self,
        records: Iterator[Generated],
        stream: TextStream,
        said: list[str],
        end_ids: Collection[int],
    ) -> Iterator[Event]:
        """Yield the events of a reply while it is generated; append its text to the list `said`."""
        for record in self._timed(records):
            if isinstance(record, GeneratedToken):
                self.stats.tokens_out += 1
                said.append(stream.push(record.id))
                if said[-1]:
                    yield Delta(said[-1])
            elif isinstance(record, EvictedRows):
                yield self._evicted(record)
            elif isinstance(record, ChosenToken):
                yield Choosing(record)
            elif record.reason == "stop" and record.stop_id not in end_ids:
                self.stats.finish = "control"
            else:
                self.stats.finish = record.reason
        said.append(stream.flush())
        yield Delta(said[-1])

    def close(self, closing: Sequence[int]) -> list[Event]:
        """Read the template ids `closing` after a reply, and end the round; returns the events.

        If the reasoning of replies is to be evicted, that of this reply is evicted now.
        """
        events = list(self.read(_template_ids(closing)))
        self._close_round()
        if self._evicts_thinking:
            thought = reasoning(self._engine.ledger, self._events.texts, self.ref.turn)
            if len(thought):
                moves = self._engine.residency.exclude(thought)
                events += self._events.moved(self.ref.turn, moves)
        return [event for event in events if not isinstance(event, Reading)]

    def flush(self) -> list[Event]:
        """Read the pending ids, which must follow a turn that was cut off; returns the events."""
        if not self._now.pending_ids:
            return []
        events = list(self.read(_template_ids(self._now.pending_ids)))
        if self._now.in_round:
            self._close_round()
        return events

    def done(self, text: str) -> TurnDone:
        """End the turn, whose message is `text`; returns the event for it."""
        self._now.finish(self.stats, text)
        return self._events.done(self.stats, text)

    def _timed(self, records: Iterator[Generated]) -> Iterator[Generated]:
        """Yield the engine's `records`, and count its time for them in `stats.seconds_decode`."""
        while True:
            start = time.perf_counter()
            record = next(records, None)
            if isinstance(record, ChosenToken):  # the time until it is read counts
                yield record
                record = next(records, None)
            self.stats.seconds_decode += time.perf_counter() - start
            if record is None:
                return
            yield record

    def _note_pending(self, turn: TurnIds, done: int, after: Sequence[int]) -> None:
        """Set the pending ids: those that follow the text of `turn` and are unread, then `after`.

        `done` is the number of ids of `turn` that the engine has read.
        """
        self._now.pending_ids = [*turn.ids[max(done, turn.content[1]) :], *after]

    def _evicted(self, record: EvictedRows) -> Event:
        self.stats.evicted += len(record.positions)
        return self._events.evicted(self.stats.index, record)

    def _close_round(self) -> None:
        self._engine.close_round()
        self._now.in_round = False


def _template_ids(ids: Sequence[int]) -> TurnIds:
    """The ids of a turn that has only chat-template `ids` and no text."""
    return TurnIds(list(ids), [Role.TEMPLATE] * len(ids), (0, 0))
