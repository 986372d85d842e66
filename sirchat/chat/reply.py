"""A reply while it is generated: makes events of each step, and ends the round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import starmap

import numpy as np

from sirchat.chat.events import Delta, Event, Finish, Notice
from sirchat.chat.state import UNFINISHED
from sirchat.chat.turn import OpenTurn
from sirchat.chat.undo_history import UndoHistory, UndoPoint
from sirchat.engine.engine import Generation, StepResult, step
from sirchat.engine.types import GeneratedToken, Stopped
from sirchat.errors import ContextFullError
from sirchat.memory.ledger import EvictedRows, Role
from sirchat.text.loops import LoopCheck
from sirchat.text.reply_parts import Piece, ReplyStream


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

    def __enter__(self) -> OpenReply:
        try:
            self.generation.__enter__()
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
            elif isinstance(record, EvictedRows):
                events.append(self._turn.evicted(record))
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
