"""Lets the engine read or generate the ids of one turn, and yields the turn's events.

The template's ids that end a turn are *pending* until the engine has read them; if an error cuts
the turn off, they are read before the next turn, so that the chat always follows its template.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, starmap

import numpy as np

from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Choosing, Delta, Event, Finish, Notice, Reading, TurnDone
from sirchat.chat.state import CUT, ConversationState, TurnStats
from sirchat.engine.engine import Engine
from sirchat.engine.types import (
    ChosenToken,
    EvictedRows,
    Generated,
    GeneratedToken,
    ReadProgress,
    TurnRef,
)
from sirchat.errors import ContextFullError
from sirchat.memory.ledger import Flag, Role
from sirchat.memory.placement import Placement
from sirchat.recall.recall import Recall
from sirchat.text.loops import LoopCheck
from sirchat.text.reply_parts import Piece, ReplyStream
from sirchat.text.template import TurnIds
from sirchat.text.times import time_range

Interrupted = Callable[[], bool]


class OpenTurn:
    """One turn, while it is read or generated; its methods increase the counts of `stats`.

    `evicts_thinking`: whether a reply's reasoning is evicted when the reply is complete.
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
        self._at_end: Placement | None = None  # when the round ended, if recall had moved tokens
        self.stats = stats
        self.ref = TurnRef(stats.index, now.round)

    @property
    def placement(self) -> Placement:
        """Where the tokens were at the round's end, if that has moved any back; else, are now."""
        return self._at_end or self._engine.store.placement

    def make_room(self, count: int, max_new_tokens: int) -> list[Event]:
        """Evict tokens before a user turn of `count` ids is read, as the setting `evict` says."""
        records = self._engine.evictor.make_room_for_turn(count, max_new_tokens, self.ref)
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

        An interrupt skips the rest of the text, but not the template's ids after it. If reading
        fails, `after`, which the caller reads later in this round, becomes pending, too.
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

    def recall(self, recall: Recall, ids: TurnIds) -> Iterator[Event]:
        """Restore what fits a message of these ids, before this turn is answered.

        Nothing is restored from calls of tools. If this turn is what a tool returned, the message
        that led to the call is not restored either.
        """
        turns, before = self._now.turns, self.stats.index
        # After a million tokens, making these lists takes a noticeable part of the search's time.
        own = [at for at, turn in enumerate(turns) if turn.role == "assistant"]
        generated = [at for at in own if turns[at].finish != "read"]
        out = [at - 1 for at, turn in enumerate(turns) if turn.role == "tool"]
        out = [at for at in out if turns[at].role == "assistant"]
        if is_result := turns[before].role == "tool":
            out += [at for at in range(before) if turns[at].role == "user"][-1:]
        recollection = recall.restore_for_turn(
            *(ids.ids, ids.roles, self.ref, generated),
            lambda text: self._now.user_turns_at(time_range(text, time.time()), before),
            out,
            before if is_result else -1,
        )
        if recollection is not None:
            self.stats.seconds_prefill += recollection.seconds
            yield from self._events.recalled(self.stats.index, recollection)

    def read_result(
        self,
        turn: TurnIds,
        interrupted: Interrupted,
        recall: Recall,
        sought: TurnIds,
        *,
        head: int = 0,
        after: Sequence[int] = (),
    ) -> Iterator[Event]:
        """As `read`, with the first `head` ids pinned; what fits `sought` is recalled at the end.

        That is before the template's ids after the text, as the reply's first token follows them.
        """
        end = turn.content[1]
        for first, last in pairwise(sorted({0, head, end, len(turn.ids)})):
            if first == end:
                yield from self.recall(recall, sought)
            text = max(turn.content[0], first) - first, min(end, last) - first
            part = TurnIds(turn.ids[first:last], turn.roles[first:last], text)
            rest = [*turn.ids[max(last, end) :], *after]
            if first >= end:
                part = replace(part, content=(0, 0))
            yield from self.read(part, interrupted, pinned=last <= head, after=rest)

    def answer(
        self,
        records: Iterator[Generated],
        stream: ReplyStream,
        closing: Sequence[int],
        end_ids: Collection[int],
        finish: Finish | None = None,
        loops: LoopCheck | None = None,
        at_cut: Callable[[], None] = lambda: None,
    ) -> Iterator[Event]:
        """Yield the events of a reply as the engine generates it, then read the `closing` ids.

        A stop id that is not one of the `end_ids` is a control token; `finish`, if given, is the
        reason of the end to record. `at_cut` is called before the `closing` ids, if it can go on.
        """
        # If an error cuts the reply off, its text until then is stored, and the `closing` ids are
        # read before the next turn.
        stats, failure, stop_id = self.stats, None, None
        at, said = self._said_before(stream, loops)
        self._now.reply, self._now.pending_ids = stats, list(closing)
        stats.finish = "interrupt"  # not changed if the caller stops taking events
        try:
            try:
                start = time.perf_counter()
                for record in records:
                    if isinstance(record, ChosenToken):
                        yield Choosing(record)
                        continue  # the time until it is read counts
                    stats.seconds_decode += time.perf_counter() - start
                    if isinstance(record, GeneratedToken):
                        stats.tokens_out += 1
                        at.append(record.position)
                        said += (new := stream.push_id(record.id))
                        if loops is not None:
                            loops.push(_joined(new))
                        yield from starmap(Delta, new)
                    elif isinstance(record, EvictedRows):
                        yield self._evicted(record)
                    else:
                        stop_id, reason = record.stop_id, record.reason
                        is_end = reason != "stop" or stop_id in end_ids
                        cut: Finish = "loop" if loops and loops.found else reason
                        end: Finish = "stop" if stream.has_ended else cut
                        stats.finish = finish or (end if is_end else "control")
                    start = time.perf_counter()
                stats.seconds_decode += time.perf_counter() - start
                if stats.finish in CUT:
                    at_cut()
                said += (new := stream.flush())
                yield from starmap(Delta, new or [("",)])
            except ContextFullError as error:
                stats.finish, failure = "context", error
            ids = self._engine.ledger.column("token_id")[np.asarray(at, np.int64)].tolist()
            closed = self.close(_unread(closing, ids, end_ids), stream, at)
        except BaseException:  # the caller stopped taking events, or the model failed
            self._now.finish(stats, *_texts(said))
            raise
        yield from closed
        text, thinking = _texts(said)
        yield self.finish(text, thinking)
        if finish is None and not text.strip():
            yield from self._say_why_empty(thinking, stop_id)
        yield from self._events.take_problems()
        if failure is not None:
            yield Notice(str(failure))

    def _said_before(
        self, stream: ReplyStream, loops: LoopCheck | None
    ) -> tuple[list[int], list[Piece]]:
        """The positions and pieces of what a reply that goes on has said, for both arguments."""
        ledger, said = self._engine.ledger, list[Piece]()
        is_said = ledger.column("turn") == self.ref.turn
        at = np.flatnonzero(is_said & (ledger.column("role") == Role.ASSISTANT)).tolist()
        for token_id in ledger.column("token_id")[at].tolist():
            said += stream.push_id(token_id)
        if loops is not None:
            loops.push(_joined(said))
            if loops.found:  # the user has let it go on
                loops.begin()
        return at, said

    def _say_why_empty(self, thinking: str, stop_id: int | None) -> Iterator[Notice]:
        """Say why a reply has no answer; `stop_id` has ended it."""
        finish, many = self.stats.finish, f"the {self.stats.tokens_out:,} tokens"
        (end,) = ["USER:"] if stop_id is None else self._events.texts([stop_id], [0])
        if finish in ("stop", "control") and thinking:
            yield Notice(f"the reply has no answer: {end} ended it after its reasoning")
        elif finish == "length" and thinking:
            why = f"all of {many} that --max-new-tokens allows were reasoning"
            yield Notice(f"the reply has no answer: {why}")
        elif finish == "stop":
            yield Notice(f"the reply is empty: the model ended it at once, with {end}")
        elif finish == "control":
            why = f"it began with the control token {end}, which belongs in no reply of this model"
            yield Notice(f"the reply is empty: {why}")

    def close(self, closing: Sequence[int], stream: ReplyStream, at: Sequence[int]) -> list[Event]:
        """Read the template ids `closing` after a reply, and end the round; returns the events.

        Beginnings of results are then no longer pinned.
        `stream` has divided the reply, whose tokens have the positions `at`.
        """
        events = [*self.read(_template_ids(closing)), *self._end_round()]
        tokens, dropped = np.asarray(at, np.int64), stream.dropped()
        self._engine.ledger.pin(np.asarray(self._now.heads, np.int64), False)
        self._now.heads = []
        self._engine.ledger.flag(Flag.THINKING, tokens[stream.tokens("thinking")], True)
        excluded = tokens[stream.tokens("end")]
        if self._evicts_thinking and len(dropped):  # with what the header has of it
            header = np.arange(at[0] - stream.unkept_header, at[0])
            excluded = np.concatenate([header, tokens[dropped], excluded])
        if len(excluded):
            moves = self._engine.evictor.exclude(excluded)
            events += self._events.moved(self.ref.turn, moves)
        return [event for event in events if not isinstance(event, Reading)]

    def read_pending(self) -> list[Event]:
        """Read the pending ids, which must follow a turn that was cut off; returns the events."""
        events = list(self.read(_template_ids(self._now.pending_ids)))
        return [*events, *self._end_round()] if self._now.in_round else events

    def finish(self, text: str, thinking: str = "") -> TurnDone:
        """End the turn, whose message is `text` after `thinking`; returns the event for it."""
        self._now.finish(self.stats, text, thinking)
        recalled = len(self.placement.recalled)
        return self._events.done(self.stats, text, thinking, recalled)

    def _note_pending(self, turn: TurnIds, done: int, after: Sequence[int]) -> None:
        """Set the pending ids: the unread ones after the text of `turn`, then those `after` it."""
        self._now.pending_ids = [*turn.ids[max(done, turn.content[1]) :], *after]

    def _evicted(self, record: EvictedRows) -> Event:
        self.stats.evicted += len(record.positions)
        return self._events.evicted(self.stats.index, record)

    def _end_round(self) -> list[Event]:
        """End recall; let surprisal and attention decay; the next user turn begins a round."""
        now = self._engine.store.placement
        self._at_end = None if now.is_plain else now
        events = [self._evicted(record) for record in self._engine.evictor.end_recall()]
        self._engine.decay_at_round_end()
        self._now.in_round = False
        return events


def _unread(closing: Sequence[int], ids: list[int], ends: Collection[int]) -> Sequence[int]:
    """The ids `closing` but the first ones, before an end id, with which the reply has ended."""
    end = next((at for at, token_id in enumerate(closing) if token_id in ends), 0)
    said = (size for size in range(end, 0, -1) if ids[-size:] == list(closing[:size]))
    return closing[next(said, 0) :]


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _texts(said: Sequence[Piece]) -> tuple[str, str]:
    """The text and the reasoning of a reply in pieces."""
    thinking = "".join(piece.text for piece in said if piece.part == "thinking")
    return "".join(piece.text for piece in said if piece.part != "thinking"), thinking


def _template_ids(ids: Sequence[int]) -> TurnIds:
    return TurnIds(list(ids), [Role.TEMPLATE] * len(ids), (0, 0))
