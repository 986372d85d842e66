"""A conversation: turns in, events out, settings that switch in the middle.

Nobody but the session touches the engine. After every event the conversation is well-formed: a
reply that was interrupted, or ran out of room, is closed like any other.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from sirchat import __version__
from sirchat.conversation import UNDO_DEPTH, Conversation, Moment, Tally, Turn
from sirchat.detokenize import SentenceEnds, TextStream, TokenTexts
from sirchat.engine import Engine
from sirchat.errors import ContextFullError, UndoError, UsageError
from sirchat.events import (
    CameBack,
    Delta,
    Ended,
    Erased,
    Event,
    Forgot,
    Notice,
    Pinned,
    Reading,
    Started,
    Switched,
    TokenRow,
    TurnDone,
    Undone,
)
from sirchat.memory.ledger import Role
from sirchat.memory.segments import Rows
from sirchat.model import LoadedModel
from sirchat.paths import archives_dir
from sirchat.profile import Profile, changed
from sirchat.records import Evicted, Generated, Place, Read, Restored, Saved, Stopped
from sirchat.sampling import Sampler
from sirchat.settings import (
    build_memory,
    build_sampling,
    check_budget,
    has_effect,
    refuse_fixed,
)
from sirchat.snapshot import Positions, Snapshot, take_snapshot, token_rows
from sirchat.targets import positions_of, turn_meant, unquoted, without
from sirchat.template import Template, TurnIds
from sirchat.why import Standing, standings

Interrupted = Callable[[], bool]


class Session:
    """One conversation with one model.

    Args:
        model: loaded and probed.
        profile: every setting; `session.profile` is the one in force.
        rows_in_events: whether turns and evictions carry their tokens.

    Raises:
        SettingError: a setting that this model does not allow.
    """

    def __init__(
        self, model: LoadedModel, profile: Profile, *, rows_in_events: bool = False
    ) -> None:
        self.model = model
        self.profile = profile
        self._rows_in_events = rows_in_events
        self._template = Template(model.tokenizer)
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        self.stop_ids = self._template.stop_ids(declared)
        self._texts = TokenTexts(model.tokenizer)
        self.epoch = self.erasures = 0
        check_budget(profile, model, "budget")
        self.reset()

    def reset(self) -> None:
        """Forget the whole conversation; the settings stay."""
        self._folder = archives_dir() / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._engine = Engine(
            self.model,
            build_memory(self.profile, self._folder),
            seed=self.profile.seed,
            ends_sentence=SentenceEnds(self.model.tokenizer),
        )
        self.epoch += 1
        self._now = Conversation()
        self._moments: list[Moment] = []  # the beginnings of the turns that can be undone

    @property
    def conversation(self) -> Conversation:
        """Where the conversation stands; for reading only."""
        return self._now

    @property
    def turns(self) -> list[Turn]:
        """What was said, turn by turn; for reading only."""
        return self._now.turns

    def save(self) -> Saved:
        """The engine's state, but keys and values; see `saving`."""
        return self._engine.save()

    def rows(self, limit: int | None = None) -> Rows | None:
        """Keys and values of all that is held or archived, on the CPU.

        Of what is held alone, if all take more than `limit` bytes; None if that does, too.
        """
        return self._engine.holding.rows(limit)

    def load(self, saved: Saved, conversation: Conversation, rows: Rows | None) -> None:
        """Go on where a saved session was; without `rows` the held tokens are read anew.

        Turns of before can't be undone.
        """
        self.reset()
        self._engine.load(saved, rows, self.model.device)
        self._now = conversation

    @property
    def resident(self) -> int:
        """Tokens held now."""
        return self._engine.resident

    @property
    def seen(self) -> int:
        """Tokens ever read."""
        return self._engine.ledger.seen

    @property
    def budget(self) -> int:
        """Tokens that may be held."""
        return self._engine.budget

    @property
    def speed(self) -> float:
        """Tokens a second of the reply under way, else of the last one; 0 before the first."""
        return self._now.reply.tokens_out / max(self._now.reply.seconds_decode, 1e-9)

    @property
    def _undo_depth(self) -> int:
        return UNDO_DEPTH if self.profile.archive != "off" else 1

    @property
    def _turns(self) -> int:
        return len(self._now.turns)

    def start(self) -> Iterator[Event]:
        """The opening record, and what the user should know of this model."""
        yield Started(
            version=__version__,
            model=self.model.name,
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            context_length=self.model.context_length,
            profile=self.profile.model_dump(),
        )
        if self.model.window is not None and self.budget > self.model.window:
            yield Notice(
                f"this model's sliding-window layers see {self.model.window} tokens; with a budget "
                f"of {self.budget} their window counts held tokens"
            )

    def ask(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a user turn and answer it.

        Raises ContextFullError, with nothing read, when nothing may be forgotten and the turn does
        not fit.
        """
        yield from self.read_user(text, interrupted)
        yield from self._answer(interrupted)

    def retry(self, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Undo the last user turn and say it again; where replies are drawn, with other draws.

        Raises UndoError, changing nothing, as `undo` does.
        """
        attempt = self._now.attempt + 1
        for event in self.undo():
            yield event
            if isinstance(event, Undone):
                yield from self.read_user(event.text, interrupted)
        self._now.attempt = attempt
        yield from self._answer(interrupted)

    def read_user(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a user turn, and the system prompt before the first one."""
        yield from self._settle()
        if self.seen == 0:
            system, ids = self._template.opening(text, self.profile.system)
        else:
            system, ids = None, self._template.user(text)
        self._check_room(ids, system)
        moment = Moment.of(self._now, self._engine.mark(), text)
        self._moments = [*self._moments, moment][-self._undo_depth :]
        if system is not None:
            yield from self._read_system(system)
        self._now.round += 1
        self._now.attempt = 0
        self._now.in_round = True
        tally = self._tally("user")
        place = Place(tally.index, self._now.round)
        closing = self._template.closing
        wanted = self.profile.max_new_tokens + len(closing)
        for record in self._engine.open_turn(len(ids.ids), wanted, place):
            yield self._forgot(record, tally)
        yield from self._feed(ids, place, tally, interrupted, after=closing)
        yield self._done(tally, text)
        yield from self._troubles()

    def read_reply(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a reply from a transcript instead of generating one."""
        tally = self._tally("assistant")
        ids = self._template.assistant(text)
        place = Place(tally.index, self._now.round)
        self._engine.require(len(ids.ids) + len(self._template.closing))
        yield from self._feed(ids, place, tally, interrupted, after=self._template.closing)
        yield from self._close(place, tally)
        yield self._done(tally, text)
        yield from self._troubles()

    def undo(self) -> Iterator[Event]:
        """Take the last user turn back, with all that came after it: it has never been.

        The settings stay, and so do pins. Raises UndoError, changing nothing, where there is no
        such turn, or something it had pushed out is gone.
        """
        if not self._moments:
            off = self.seen and self.profile.archive == "off"
            hint = "more turns can be undone with /set archive ram" if off else ""
            raise UndoError("there is no turn to undo", hint=hint)
        moment = self._moments[-1]
        try:
            self._engine.undo(moment.checkpoint)
        except LookupError:
            raise UndoError("this turn can't be undone: what it pushed out is gone") from None
        self._moments.pop()
        self._now = moment.conversation(self._now)
        if self._now.prompt != self.profile.system and self.seen:
            self.profile = self.profile.model_copy(update={"system": self._now.prompt})
            self._engine.ledger.pin(self._now.system, self.profile.pin_system)
        yield Undone(self._turns, moment.text, self.resident, self.seen)

    def pin(self, target: str, pinned: bool = True) -> Iterator[Event]:
        """Never forget what `target` means, or let it go; `targets.positions_of` says how.

        What is archived comes back. Raises UsageError where nothing is meant, and SettingError,
        changing nothing, when the pins would leave too little room.
        """
        positions = self._meant(target, self._engine.holding.reachable())
        yield from self._moved(list(self._engine.pin(positions, pinned)))
        yield Pinned(len(positions), pinned, self.resident)
        if not self._engine.memory.policy.honours_pins:
            yield Notice(f"policy {self.profile.policy} makes no use of pins")

    def forget(self, target: str) -> Iterator[Event]:
        """Erase what `target` means: from cache, archive, ledger, text, and what could be undone.

        What was read after it has seen it, and stays. Raises UsageError where nothing is meant.
        """
        turn = turn_meant(target, self._now.roles)
        try:
            positions = self._meant(target, np.arange(self.seen))
        except UsageError:
            if turn is not None or not self._says(unquoted(target)):
                raise
            positions = np.zeros(0, np.int64)  # a turn that was interrupted has unread text
        self._engine.forget(positions)
        for n, one in enumerate(self._now.turns):
            if turn is None:
                one.text = without(target, one.text)
            elif n == turn:
                one.text = ""
        if turn is None and self.profile.system:
            system = without(target, self.profile.system)
            self.profile = self.profile.model_copy(update={"system": system or None})
        elif turn is not None and self._now.turns[turn].role == "system":
            self.profile = self.profile.model_copy(update={"system": None})
        self._now.prompt = self.profile.system
        self._moments = []
        self.erasures += 1
        yield Erased(len(positions), self.resident)

    def _says(self, text: str) -> bool:
        """Whether a text was said, read or not."""
        said = [self.profile.system or "", *(turn.text for turn in self._now.turns)]
        return bool(text) and any(text.lower() in one.lower() for one in said)

    def why(self, target: str) -> list[Standing]:
        """Where the tokens stand that `target` means, held or not; raises UsageError for none."""
        return standings(
            self._engine,
            self._texts,
            self._meant(target, np.arange(self.seen)),
            sinks=self.profile.sinks,
            threshold=self.snapshot(strongest=0).threshold,
        )

    def _meant(self, target: str, among: Positions) -> Positions:
        ledger, roles = self._engine.ledger, self._now.roles
        return positions_of(target, ledger, self._texts, roles, among)

    def switch(
        self, source: str, interrupted: Interrupted = lambda: False, /, **updates: Any
    ) -> Iterator[Event]:
        """Change settings at once; what no longer fits is chosen by the new ones.

        Another system prompt is read and pinned at once, and the old one is let go; an interrupt
        cuts it short. Raises SettingError, changing nothing; `source` is what it blames, such as
        "/budget".
        """
        before, profile = self.profile, changed(self.profile, source, **updates)
        refuse_fixed(before, profile, source)
        check_budget(profile, self.model, source)
        memory = build_memory(profile, self._folder)
        replaced = self.seen > 0 and profile.system != before.system
        prompt = self._template.system(profile.system) if replaced and profile.system else None
        ledger = self._engine.ledger
        flags = ledger.column("flags")[: self.seen].copy()
        if replaced or profile.pin_system != before.pin_system:
            ledger.pin(self._now.system, profile.pin_system and not replaced)
        try:
            pins = len(prompt.ids) if prompt is not None and profile.pin_system else 0
            moves = list(self._engine.switch(memory, pins))
            self._engine.require(len(prompt.ids) if prompt is not None else 0)
        except Exception:  # whatever the new policy raises
            ledger.column("flags")[:] = flags
            list(self._engine.switch(build_memory(before, self._folder)))
            raise
        yield from self._moved(moves)
        self.profile = profile
        if replaced:
            self._now.system, self._now.prompt = range(0), None
        restored = sum(len(one.positions) for one in moves if isinstance(one, Restored))
        yield from self._changes(before, restored)
        if prompt is not None:
            yield from self._settle()
            yield from self._read_system(prompt, interrupted)

    def _moved(self, moves: Sequence[Evicted | Restored]) -> Iterator[Event]:
        """What left and what came back between two turns."""
        between = Tally(max(0, self._turns - 1), "")
        for record in moves:
            if isinstance(record, Evicted):
                yield self._forgot(record, between)
            else:
                yield CameBack(between.index, *self._place_of(record))

    def _changes(self, before: Profile, restored: int) -> Iterator[Event]:
        """What is other than it was; the first change tells what came `restored`."""
        for name in type(before).model_fields:
            old, new = getattr(before, name), getattr(self.profile, name)
            if old != new:
                yield Switched(name, old, new, restored=restored, resident=self.resident)
                restored = 0
                if not has_effect(self.profile, name):
                    yield Notice(f"policy {self.profile.policy} makes no use of {name}")

    def end(self) -> Ended:
        """The closing record."""
        return Ended(
            turns=self._turns,
            seen=self.seen,
            resident=self.resident,
            tokens_out=self._now.totals.tokens_out,
            seconds_prefill=self._now.totals.seconds_prefill,
            seconds_decode=self._now.totals.seconds_decode,
        )

    def snapshot(self, strongest: int | None = None) -> Snapshot:
        """The memory as it is now; with `strongest`, a glance at so many rows of highest score."""
        return take_snapshot(
            self._engine,
            self.profile,
            self._texts,
            self._now.roles,
            model=self.model.name,
            speed=self.speed,
            in_round=self._now.in_round,
            strongest=strongest,
        )

    def tokens(self, positions: Sequence[int]) -> tuple[TokenRow, ...]:
        """The tokens at these stream positions, ascending, held or not."""
        return self._rows(np.asarray(positions, np.int64))

    def _answer(self, interrupted: Interrupted) -> Iterator[Event]:
        tally = self._now.reply = self._tally("assistant")
        place = Place(tally.index, self._now.round)
        stream = TextStream(self.model.tokenizer)
        said: list[str] = []
        tally.finish = "interrupt"  # what it is if the listener goes away
        failure: ContextFullError | None = None
        try:
            for record in self._generate(place, tally, interrupted):
                if isinstance(record, Generated):
                    said.append(stream.push(record.id))
                    if said[-1]:
                        yield Delta(said[-1])
                elif isinstance(record, Evicted):
                    yield self._forgot(record, tally)
                else:
                    tally.finish = record.reason
            said.append(stream.flush())
            yield Delta(said[-1])
        except ContextFullError as error:
            tally.finish, failure = "context", error
        finally:
            closing = list(self._close(place, tally))
        yield from closing
        yield self._done(tally, "".join(said))
        yield from self._troubles()
        if failure is not None:
            yield Notice(str(failure))

    def _generate(
        self, place: Place, tally: Tally, interrupted: Interrupted
    ) -> Iterator[Generated | Evicted | Stopped]:
        """The engine's records, timed; the clock stops while the listener has the record."""
        records = self._engine.generate(
            Sampler(build_sampling(self.profile), self._now.attempt),
            place,
            stop_ids=self.stop_ids,
            max_new_tokens=self.profile.max_new_tokens,
            reserve=len(self._template.closing),
            interrupted=interrupted,
        )
        while True:
            start = time.perf_counter()
            record = next(records, None)
            tally.seconds_decode += time.perf_counter() - start
            if record is None:
                return
            if isinstance(record, Generated):
                tally.tokens_out += 1
            yield record

    def _close(self, place: Place, tally: Tally) -> Iterator[Event]:
        """Read the ids that end a reply, and let the round's decay take effect."""
        closing = self._template.closing
        ids = TurnIds(closing, [Role.TEMPLATE] * len(closing), (0, 0))
        yield from (e for e in self._feed(ids, place, tally) if not isinstance(e, Reading))
        self._close_round()

    def _close_round(self) -> None:
        self._engine.close_round()
        self._now.in_round = False

    def _settle(self) -> Iterator[Event]:
        """Close a turn that a failure left open, so that the conversation is well-formed again."""
        if self.seen == 0:  # nothing of it was read: it has never been
            self._now.owed, self._now.turns = [], []
        if self._now.owed:
            tally = Tally(max(0, self._turns - 1), "")
            place = Place(tally.index, self._now.round)
            owed = TurnIds(self._now.owed, [Role.TEMPLATE] * len(self._now.owed), (0, 0))
            yield from self._feed(owed, place, tally)
            if self._now.in_round:
                self._close_round()

    def _read_system(
        self, ids: TurnIds, interrupted: Interrupted = lambda: False
    ) -> Iterator[Event]:
        tally = self._tally("system")
        place = Place(tally.index, self._now.round)
        start = self.seen
        try:
            yield from self._feed(ids, place, tally, interrupted, pinned=self.profile.pin_system)
        finally:  # what was read is pinned, and can be let go, however the reading ended
            self._now.system = range(start, self.seen)
            self._now.prompt = self.profile.system
        yield self._done(tally, self.profile.system or "")

    def _feed(
        self,
        turn: TurnIds,
        place: Place,
        tally: Tally,
        interrupted: Interrupted = lambda: False,
        *,
        pinned: bool = False,
        after: Sequence[int] = (),
    ) -> Iterator[Event]:
        """Read a turn; an interrupt skips the rest of its text, never the template's ids.

        `after` are the ids that its round still needs, should reading fail.
        """
        done, end = 0, len(turn.ids)
        self._now.owed = [*turn.ids[turn.content[1] :], *after]
        while done < end:
            records = self._engine.feed(turn.ids[done:], turn.roles[done:], place, pinned=pinned)
            begun, skip = done, False
            while not skip:
                start = time.perf_counter()
                record = next(records, None)
                tally.seconds_prefill += time.perf_counter() - start
                if record is None:
                    break
                if isinstance(record, Read):
                    tally.tokens_in += begun + record.done - done
                    done = begun + record.done
                    self._now.owed = [*turn.ids[max(done, turn.content[1]) :], *after]
                    yield Reading(done, end)
                    skip = interrupted() and turn.content[0] <= done < turn.content[1]
                else:
                    yield self._forgot(record, tally)
            if skip:
                done, tally.finish = turn.content[1], "interrupt"

    def _check_room(self, ids: TurnIds, system: TurnIds | None = None) -> None:
        """Refuse a turn, before anything is read, when it can't fit."""
        before = len(system.ids) if system is not None else 0
        if system is not None and self.profile.pin_system:
            self._engine.check_pins(before)
        self._engine.require(before + len(ids.ids) + len(self._template.closing))

    def _tally(self, role: str) -> Tally:
        tally = Tally(self._turns, role)
        self._now.turns.append(Turn(role))
        return tally

    def _forgot(self, record: Evicted, tally: Tally) -> Event:
        tally.evicted += len(record.positions)
        return Forgot(tally.index, *self._place_of(record))

    def _place_of(
        self, record: Evicted | Restored
    ) -> tuple[tuple[int, ...], int, int, tuple[TokenRow, ...] | None]:
        """What an event tells of tokens that moved."""
        rows = self._rows(record.positions) if self._rows_in_events else None
        return tuple(record.positions.tolist()), record.resident, record.seen, rows

    def _done(self, tally: Tally, text: str) -> TurnDone:
        self._now.turns[tally.index] = Turn(tally.role, text, tally.finish)
        totals = self._now.totals
        totals.tokens_out += tally.tokens_out
        totals.seconds_prefill += tally.seconds_prefill
        totals.seconds_decode += tally.seconds_decode
        return TurnDone(
            text=text,
            resident=self.resident,
            seen=self.seen,
            recalled=0,
            tokens=self._rows(self._engine.ledger.held_positions) if self._rows_in_events else None,
            **{field.name: getattr(tally, field.name) for field in fields(tally)},
        )

    def _troubles(self) -> Iterator[Notice]:
        """What went wrong with the archive; the conversation goes on."""
        troubles = self._engine.holding.troubles
        while troubles:
            yield Notice(troubles.pop(0))

    def _rows(self, positions: Positions) -> tuple[TokenRow, ...]:
        return token_rows(self._engine.ledger, positions, self._texts, self.profile.sinks)
