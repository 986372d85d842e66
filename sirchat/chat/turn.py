"""Lets the engine read the ids of one turn, and yields the turn's events.

The template's ids that end a turn are *pending* until the engine has read them. If an error cuts
the turn off, they are read before the next turn, so that the chat always follows its template.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Event, Reading, TurnDone
from sirchat.chat.state import ConversationState, TurnStats
from sirchat.engine.engine import Engine
from sirchat.engine.types import ReadProgress, TurnRef
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import EvictedRows, Flag, Placement, Role
from sirchat.recall.recall import NewTurn, Recall
from sirchat.text.reply_parts import ReplyStream
from sirchat.text.template import TurnIds

Interrupted = Callable[[], bool]  # whether to stop; called now and then


def never() -> bool:
    return False


class OpenTurn:
    """One turn that is being read or generated; its counts are in `stats`.

    `evicts_thinking`: whether a reply's reasoning is evicted when the reply is complete.
    """

    def __init__(
        self,
        state: ConversationState,
        engine: Engine,
        events: EventBuilder,
        stats: TurnStats,
        evicts_thinking: bool = False,
    ) -> None:
        self.state = state
        self.engine = engine
        self.events = events
        self._evicts_thinking = evicts_thinking
        self._placement_in_round: Placement | None = None  # at its end, if recall had moved tokens
        self.stats = stats
        self.ref = TurnRef(stats.index, state.round)

    @property
    def placement(self) -> Placement:
        """Where the tokens were at the end of the round, before recall ended; until then, now."""
        return self._placement_in_round or self.engine.store.placement

    def make_room(self, count: int, max_new_tokens: int) -> list[Event]:
        """Evict tokens before a user turn of `count` ids is read, as the setting `evict` says."""
        records = self.engine.evictor.make_room_for_turn(count, max_new_tokens, self.ref)
        return [self.evicted(record) for record in records]

    def read(
        self,
        turn: TurnIds,
        interrupted: Interrupted = never,
        *,
        pinned: bool = False,
        after: Sequence[int] = (),
    ) -> Iterator[Event]:
        """Let the engine read the ids of `turn`; yields events of progress and evictions.

        An interrupt skips the rest of the text, but not the template's ids after it. If reading
        fails, `after`, the ids to be read later in this round, become pending, too.
        """
        done = 0  # ids of the turn
        end = len(turn.ids)
        self._note_pending(turn, done, after)
        yield Reading(done, end)
        while done < end:
            ids, roles = turn.ids[done:], turn.roles[done:]
            records = self.engine.prefill(ids, roles, self.ref, pinned=pinned)
            begun = done
            skip = False
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
                    yield self.evicted(record)
            if skip:
                done = turn.content[1]
                self.stats.finish = "interrupt"

    def restore_fitting(self, recall: Recall, ids: TurnIds) -> Iterator[Event]:
        """Restore tokens that fit the message `ids`, before this turn is answered.

        Nothing is restored from calls of tools. If this turn is a tool's result, nothing is
        restored from the message that led to the call either.
        """
        state, before = self.state, self.stats.index
        out, result = tuple(state.calling), -1
        if state.turns[before].role == "tool":
            asked = (n for n in range(before - 1, -1, -1) if state.turns[n].role == "user")
            out, result = (*out, next(asked, -1)), before
        turn = NewTurn(ids.ids, ids.roles, state.generated, out, result)
        recollection = recall.restore_for_turn(turn, self.ref, state.restored_by_user)
        if recollection is not None:
            self.stats.seconds_prefill += recollection.seconds
            yield from self.events.recalled(self.stats.index, recollection, recall)

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
        """Read a tool's result as `read` does, with its first `head` ids pinned.

        After the text, tokens that fit `sought` are recalled. Then the template's ids before the
        reply are read.
        """
        end = turn.content[1]
        for first, last in pairwise(sorted({0, head, end, len(turn.ids)})):
            if first == end:
                yield from self.restore_fitting(recall, sought)
            content = (0, 0)  # where the text is in this part
            if first < end:
                content = (max(turn.content[0], first) - first, min(end, last) - first)
            part = TurnIds(turn.ids[first:last], turn.roles[first:last], content)
            rest = [*turn.ids[max(last, end) :], *after]
            yield from self.read(part, interrupted, pinned=last <= head, after=rest)

    def close(self, closing: Sequence[int], parts: ReplyStream, said: Sequence[int]) -> list[Event]:
        """Read the template ids `closing` after a reply, and end the round; returns the events.

        `parts` has divided the reply, whose tokens are at the positions `said`. The pins of tool
        results end.
        """
        events = [*self.read(_template_ids(closing)), *self._end_round()]
        tokens = self.flag_thinking(parts, said)
        dropped = parts.tokens_not_in_history()
        self.engine.ledger.pin(np.asarray(self.state.result_pins, np.int64), False)
        self.state.result_pins = []
        self.state.restored_by_user = []
        excluded = tokens[parts.tokens("end")]
        if self._evicts_thinking and len(dropped):  # with what the header has of it
            header = np.arange(said[0] - parts.unkept_header, said[0])
            excluded = np.concatenate([header, tokens[dropped], excluded])
        if len(excluded):
            moves = self.engine.evictor.exclude(excluded)
            events += self.events.moved(self.ref.turn, moves)
        return [event for event in events if not isinstance(event, Reading)]

    def flag_thinking(self, stream: ReplyStream, positions: Sequence[int]) -> Positions:
        """Flag the reasoning in a reply at `positions`, divided by `stream`; returns them all."""
        tokens: Positions = np.asarray(positions, np.int64)
        self.engine.ledger.flag(Flag.THINKING, tokens[stream.tokens("thinking")], True)
        return tokens

    def read_pending(self) -> list[Event]:
        """Read the pending ids, which must follow a turn that was cut off; returns the events."""
        events = list(self.read(_template_ids(self.state.pending_ids)))
        return [*events, *self._end_round()] if self.state.in_round else events

    def finish(self, text: str, thinking: str = "") -> TurnDone:
        """End the turn, whose message is `text` after `thinking`; returns the event for it."""
        self.state.finish(self.stats, text, thinking)
        recalled = len(self.placement.recalled)
        return self.events.done(self.stats, text, thinking, recalled)

    def _note_pending(self, turn: TurnIds, done: int, after: Sequence[int]) -> None:
        """Set the pending ids: the unread ones after the text of `turn`, then those `after` it."""
        self.state.pending_ids = [*turn.ids[max(done, turn.content[1]) :], *after]

    def evicted(self, record: EvictedRows) -> Event:
        self.stats.evicted += len(record.positions)
        return self.events.evicted(self.stats.index, record)

    def _end_round(self) -> list[Event]:
        """End recall, and let surprisal and attention decay; the next user turn begins a round."""
        placement = self.engine.store.placement
        self._placement_in_round = placement if placement.has_recall else None
        events = [self.evicted(record) for record in self.engine.evictor.end_recall()]
        self.engine.decay_at_round_end()
        self.state.in_round = False
        return events


def _template_ids(ids: Sequence[int]) -> TurnIds:
    return TurnIds(list(ids), [Role.TEMPLATE] * len(ids), (0, 0))
