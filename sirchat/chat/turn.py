"""A turn that is read or generated: ids go into the engine, and the turn's events come out.

The template's ids that end a turn are *pending* until the engine has read them. If an error cuts
the turn off, they are read before the next turn, so that the chat always follows its template.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np

from sirchat.chat.events import (
    Delta,
    Event,
    Evicted,
    Finish,
    Notice,
    Reading,
    Recalled,
    Restored,
    TokenRow,
    TurnDone,
)
from sirchat.chat.state import UNFINISHED, ConversationState, TurnStats, UndoHistory, UndoPoint
from sirchat.chat.token_rows import policy_scores, token_rows
from sirchat.engine.engine import Engine, Generation, StepResult, step
from sirchat.engine.types import GeneratedToken, ReadProgress, Stopped, TurnRef
from sirchat.errors import ContextFullError
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, MovedRows, Placement, Role
from sirchat.recall.recall import NewTurn, Recall
from sirchat.text.detokenizer import Texts
from sirchat.text.loops import LoopCheck
from sirchat.text.reply_parts import Piece, ReplyStream
from sirchat.text.template import TurnIds

Interrupted = Callable[[], bool]  # whether to stop; called now and then


def never() -> bool:
    return False


@dataclass(frozen=True, eq=False)
class EventBuilder:
    """Makes the events that need the text of tokens."""

    engine: Engine
    texts: Texts
    with_tokens: bool  # whether events have a record of each token, besides its stream position

    def tokens(self, positions: Positions) -> tuple[TokenRow, ...]:
        """A record of each token, held or evicted, at these stream positions, ascending."""
        scores = policy_scores(self.engine, positions)
        return token_rows(self.engine, positions, self.texts, scores)

    def tokens_if_wanted(self, positions: Positions) -> tuple[TokenRow, ...] | None:
        return self.tokens(positions) if self.with_tokens else None

    def moved(self, turn: int, records: Sequence[MovedRows]) -> list[Event]:
        """An event for each record of evicted or restored tokens; `turn` is the last turn."""
        events = list[Event]()
        for record in records:
            kind = Restored if record.restored else Evicted
            tokens = self.tokens_if_wanted(record.positions)
            positions = tuple(record.positions.tolist())
            events.append(kind(turn, positions, record.resident, record.seen, tokens))
        return events

    def take_problems(self) -> list[Notice]:
        """A notice for each problem of the archive since the last call; the chat continues."""
        return [Notice(text) for text in self.engine.store.take_problems()]


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
        return self.evicted(self.engine.evictor.make_room_for_turn(count, max_new_tokens, self.ref))

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
                    yield from self.evicted([record])
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
        settings, engine = self.engine.settings.recall, self.engine
        if recollection is None:
            return
        self.stats.seconds_prefill += recollection.seconds
        if recollection.problem:
            why = f"no token can be restored: {recollection.problem}"
            yield Notice(f"{why}; choose another retriever with /recall")
        positions, released = recollection.positions, recollection.released
        if settings is not None and (len(positions) or len(released)):
            yield Recalled(
                turn=before,
                retriever=settings.retriever,
                positions=tuple(positions.tolist()),
                scores=tuple(recall.scores.values()),
                released=tuple(released.tolist()),
                turns=recall.turns,
                focused=recollection.focused,
                seconds=recollection.seconds,
                resident=engine.resident,
                seen=engine.ledger.seen,
                tokens=self.events.tokens_if_wanted(positions),
            )

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
        return TurnDone(
            text=text,
            thinking=thinking,
            resident=self.engine.resident,
            seen=self.engine.ledger.seen,
            recalled=len(self.placement.recalled),
            tokens=self.events.tokens_if_wanted(self.engine.ledger.held_positions),
            **vars(self.stats),
        )

    def _note_pending(self, turn: TurnIds, done: int, after: Sequence[int]) -> None:
        """Set the pending ids: the unread ones after the text of `turn`, then those `after` it."""
        self.state.pending_ids = [*turn.ids[max(done, turn.content[1]) :], *after]

    def evicted(self, records: Sequence[MovedRows]) -> list[Event]:
        self.stats.evicted += sum(len(record.positions) for record in records)
        return self.events.moved(self.stats.index, records)

    def _end_round(self) -> list[Event]:
        """End recall, and let surprisal and attention decay; the next turn begins a round."""
        placement = self.engine.store.placement
        self._placement_in_round = placement if placement.has_recall else None
        events = self.evicted(self.engine.evictor.end_recall())
        self.engine.decay_at_round_end()
        self.state.in_round = False
        return events


def _template_ids(ids: Sequence[int]) -> TurnIds:
    return TurnIds(list(ids), [Role.TEMPLATE] * len(ids), (0, 0))


class OpenReply(AbstractContextManager["OpenReply"]):
    """A reply that is being generated: a context manager that takes each step of its `generation`.

    The caller ends the block by `end`. After an error the text so far is stored, and the template's
    ids after the reply are read before the next turn. `stops()` says whether to stop early.
    """

    def __init__(
        self,
        turn: OpenTurn,
        generation: Generation,
        parts: ReplyStream,
        closing: Sequence[int],
        end_ids: Collection[int],
        *,
        history: UndoHistory,
        stops: Callable[[], bool],
        loops: LoopCheck | None = None,
        finish: Finish | None = None,
        can_go_on: bool = True,
    ) -> None:
        self.generation = generation
        self._turn, self._parts, self._closing, self._end_ids = turn, parts, closing, end_ids
        self._stops, self._loops, self._finish = stops, loops, finish
        self._history, self._can_go_on = history, can_go_on
        self._stopped: Stopped | None = None
        self._is_done = False
        self._failure: ContextFullError | None = None
        self._positions, self._pieces = self._continued()
        turn.state.last_reply_stats, turn.state.pending_ids = turn.stats, list(closing)
        turn.stats.finish = "interrupt"  # not changed if the caller takes no more events

    @property
    def said(self) -> Sequence[Piece]:
        """The pieces of the text so far."""
        return tuple(self._pieces)

    def __enter__(self) -> OpenReply:
        try:
            self.generation.begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.generation.close()
        if not self._is_done:  # the caller took no more events, or the model failed
            self._turn.state.finish(self._turn.stats, *_answer_and_reasoning(self._pieces))
            self._turn.flag_thinking(self._parts, self._positions)
            self._turn.engine.evictor.end_recall()

    def events(self) -> Iterator[Event]:
        with self:
            while not self.is_over():
                yield from self.push(step([self.generation])[0])
            yield from self.end()

    def is_over(self) -> bool:
        """Whether the reply has ended, or must end now, so that only `end` may be called."""
        if self._stopped is not None or self._failure is not None:
            return True
        if self.generation.tokens_left <= 0:
            return False
        is_looping = self._loops is not None and self._loops.found
        return self._parts.has_ended or is_looping or self._stops()

    def push(self, done: StepResult) -> list[Event]:
        """Take the result of a step, and return its events; raises the step's error."""
        stats, events = self._turn.stats, list[Event]()
        stats.seconds_decode += done.seconds
        for record in done.records:
            if isinstance(record, GeneratedToken):
                stats.tokens_out += 1
                self._positions.append(record.position)
                new = self._parts.push_id(record.id)
                self._pieces += new
                if self._loops is not None:
                    self._loops.push(_joined(new))
                events += starmap(Delta, new)
            elif isinstance(record, MovedRows):
                events += self._turn.evicted([record])
            else:
                self._stopped = record
        if isinstance(done.error, ContextFullError):
            self._failure = done.error
        elif done.error is not None:
            raise done.error
        return events

    def end(self) -> list[Event]:
        """Read the template's ids after the reply, and end the round; returns the events."""
        turn, stats = self._turn, self._turn.stats
        self.generation.close()
        self._set_finish()
        if stats.finish in UNFINISHED and self._can_go_on:
            self._history.before_end = UndoPoint.in_round(turn.state, turn.engine)
        new = [] if self._failure else self._parts.flush()
        self._pieces += new
        empty_reply = [] if self._failure or new else [Delta("")]
        ids = turn.engine.ledger.column("token_id")[np.asarray(self._positions, np.int64)].tolist()
        unread = _unread_closing(self._closing, ids, self._end_ids)
        events = [
            *empty_reply,
            *starmap(Delta, new),
            *turn.close(unread, self._parts, self._positions),
        ]
        text, thinking = _answer_and_reasoning(self._pieces)
        events.append(turn.finish(text, thinking))
        self._is_done = True
        self._history.reply_placement = turn.placement
        self._history.reply_seen = turn.engine.ledger.seen
        if self._finish is None and not text.strip():
            events += self._explain_empty(thinking)
        events += turn.events.take_problems()
        return events if self._failure is None else [*events, Notice(str(self._failure))]

    def _set_finish(self) -> None:
        """Store why the reply ends; a stop id that is no end id is a control token."""
        stopped = self._stopped
        was_interrupted = stopped is None and not self._parts.has_ended
        found = None if was_interrupted else self._finish
        if self._failure is not None:
            found = "context"
        elif found is None and stopped is not None and stopped.reason == "stop":
            found = "stop" if stopped.stop_id in self._end_ids else "control"
        if found is None and self._parts.has_ended:
            found = "stop"
        if found is None and self._loops is not None and self._loops.found:
            found = "loop"
        self._turn.stats.finish = found or ("interrupt" if stopped is None else stopped.reason)

    def _continued(self) -> tuple[list[int], list[Piece]]:
        """The positions and pieces of the text that a continued reply has already."""
        ledger, pieces = self._turn.engine.ledger, list[Piece]()
        is_said = ledger.column("turn") == self._turn.ref.turn
        positions = np.flatnonzero(is_said & (ledger.column("role") == Role.ASSISTANT)).tolist()
        for token_id in ledger.column("token_id")[positions].tolist():
            pieces += self._parts.push_id(token_id)
        if self._loops is not None:
            self._loops.push(_joined(pieces))
            if self._loops.found:  # the user has let it go on
                self._loops.reset()
        return positions, pieces

    def _explain_empty(self, thinking: str) -> Iterator[Notice]:
        stop_id = None if self._stopped is None else self._stopped.stop_id
        stats, texts = self._turn.stats, self._turn.events.texts
        finish, many = stats.finish, f"the {stats.tokens_out:,} tokens"
        (end,) = [self._parts.stop_text] if stop_id is None else texts([stop_id], [0])
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


def _unread_closing(closing: Sequence[int], ids: list[int], ends: Collection[int]) -> Sequence[int]:
    """The rest of `closing` to be read, if the reply's ids end with its beginning."""
    end = next((index for index, token_id in enumerate(closing) if token_id in ends), 0)
    overlaps = (size for size in range(end, 0, -1) if ids[-size:] == list(closing[:size]))
    return closing[next(overlaps, 0) :]


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _answer_and_reasoning(pieces: Sequence[Piece]) -> tuple[str, str]:
    thinking = "".join(piece.text for piece in pieces if piece.part == "thinking")
    return "".join(piece.text for piece in pieces if piece.part != "thinking"), thinking
