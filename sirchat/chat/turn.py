"""A turn under way: ids go into the engine, events come out, and what it costs is counted.

However a turn ends, the conversation can be made well-formed again: what its round still has to
read is noted beforehand, as owed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from sirchat.chat.conversation import Conversation, Tally
from sirchat.chat.events import Delta, Event, Notice, Reading, TurnDone
from sirchat.chat.reports import Reports
from sirchat.engine.engine import Engine
from sirchat.engine.records import EvictedRows, Generated, Read, Stopped, TurnRef
from sirchat.errors import ContextFullError
from sirchat.memory.ledger import Role
from sirchat.text.detokenizer import TextStream
from sirchat.text.template import TurnIds

Interrupted = Callable[[], bool]


class OpenTurn:
    """One turn, while it is read or generated.

    Args:
        now: the conversation that it belongs to.
        engine: where its ids go.
        reports: makes the events.
        tally: what it cost so far; a turn of its own, or the last one where only ids are owed.
    """

    def __init__(self, now: Conversation, engine: Engine, reports: Reports, tally: Tally) -> None:
        self._now = now
        self._engine = engine
        self._reports = reports
        self.tally = tally
        self.place = TurnRef(tally.index, now.round)

    def make_room(self, count: int, wanted: int) -> Iterator[Event]:
        """Make room for `count` ids and a reply of `wanted`, where that is done turn by turn."""
        for record in self._engine.open_turn(count, wanted, self.place):
            yield self._forgot(record)

    def read(
        self,
        turn: TurnIds,
        interrupted: Interrupted = lambda: False,
        *,
        pinned: bool = False,
        after: Sequence[int] = (),
    ) -> Iterator[Event]:
        """Read ids; an interrupt skips the rest of the text, never the template's ids.

        `after` are the ids that the round still needs, should reading fail.
        """
        done, end = 0, len(turn.ids)
        self._owe(turn, done, after)
        while done < end:
            ids, roles = turn.ids[done:], turn.roles[done:]
            records = self._engine.feed(ids, roles, self.place, pinned=pinned)
            begun, skip = done, False
            while not skip:
                start = time.perf_counter()
                record = next(records, None)
                self.tally.seconds_prefill += time.perf_counter() - start
                if record is None:
                    break
                if isinstance(record, Read):
                    self.tally.tokens_in += begun + record.done - done
                    done = begun + record.done
                    self._owe(turn, done, after)
                    yield Reading(done, end)
                    skip = interrupted() and turn.content[0] <= done < turn.content[1]
                else:
                    yield self._forgot(record)
            if skip:
                done, self.tally.finish = turn.content[1], "interrupt"

    def answer(
        self,
        records: Iterator[Generated | EvictedRows | Stopped],
        stream: TextStream,
        closing: Sequence[int],
    ) -> Iterator[Event]:
        """Tell a reply as the engine generates it; however it ends, read its `closing` ids."""
        said: list[str] = []
        self._now.reply = self.tally
        self.tally.finish = "interrupt"  # what it is if the listener goes away
        failure: ContextFullError | None = None
        try:
            for record in self._timed(records):
                if isinstance(record, Generated):
                    self.tally.tokens_out += 1
                    said.append(stream.push(record.id))
                    if said[-1]:
                        yield Delta(said[-1])
                elif isinstance(record, EvictedRows):
                    yield self._forgot(record)
                else:
                    self.tally.finish = record.reason
            said.append(stream.flush())
            yield Delta(said[-1])
        except ContextFullError as error:
            self.tally.finish, failure = "context", error
        finally:
            closed = list(self.close(closing))
        yield from closed
        yield self.done("".join(said))
        yield from self._reports.troubles()
        if failure is not None:
            yield Notice(str(failure))

    def close(self, closing: Sequence[int]) -> Iterator[Event]:
        """Read the ids that end a reply, and let the round's decay take effect."""
        closed = self.read(_of_the_template(closing))
        yield from (event for event in closed if not isinstance(event, Reading))
        self._close_round()

    def settle(self) -> Iterator[Event]:
        """Read what is still owed of a turn that a failure broke off."""
        if self._now.owed:
            yield from self.read(_of_the_template(self._now.owed))
            if self._now.in_round:
                self._close_round()

    def done(self, text: str) -> TurnDone:
        """The turn is over, and `text` is what was said."""
        self._now.finish(self.tally, text)
        return self._reports.done(self.tally, text)

    def _timed(
        self, records: Iterator[Generated | EvictedRows | Stopped]
    ) -> Iterator[Generated | EvictedRows | Stopped]:
        """The same records; the clock stops while the listener has one."""
        while True:
            start = time.perf_counter()
            record = next(records, None)
            self.tally.seconds_decode += time.perf_counter() - start
            if record is None:
                return
            yield record

    def _owe(self, turn: TurnIds, done: int, after: Sequence[int]) -> None:
        """Note what must still be read, after `done` ids, even if the text is given up."""
        self._now.owed = [*turn.ids[max(done, turn.content[1]) :], *after]

    def _forgot(self, record: EvictedRows) -> Event:
        self.tally.evicted += len(record.positions)
        return self._reports.forgot(self.tally.index, record)

    def _close_round(self) -> None:
        self._engine.close_round()
        self._now.in_round = False


def _of_the_template(ids: Sequence[int]) -> TurnIds:
    """A turn without any text."""
    return TurnIds(list(ids), [Role.TEMPLATE] * len(ids), (0, 0))
