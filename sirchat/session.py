"""A conversation: turns in, events out, settings that switch in the middle.

Nobody but the session touches the engine. After every event the conversation is well-formed: a
reply that was interrupted, or ran out of room, is closed like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sirchat import __version__
from sirchat.detokenize import SentenceEnds, TextStream
from sirchat.engine import Engine, Evicted, Generated, Place, Read, Stopped
from sirchat.errors import ContextFullError
from sirchat.events import (
    Delta,
    Ended,
    Event,
    Finish,
    Forgot,
    Notice,
    Reading,
    Started,
    Switched,
    TokenRow,
    TurnDone,
)
from sirchat.memory.ledger import Flag, Role
from sirchat.model import LoadedModel
from sirchat.profile import Profile, changed
from sirchat.sampling import Sampler
from sirchat.settings import build_memory, build_sampling, check_budget, has_effect
from sirchat.template import Template, TurnIds

Interrupted = Callable[[], bool]


@dataclass
class _Tally:
    """What one turn cost so far."""

    index: int
    role: str
    tokens_in: int = 0
    tokens_out: int = 0
    evicted: int = 0
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0
    finish: Finish = "read"


@dataclass(frozen=True)
class Snapshot:
    """What a panel needs to draw the memory; rows are the held tokens in stream order."""

    model: str
    policy: str
    decay: float
    budget: int
    resident: int
    seen: int
    rows: tuple[TokenRow, ...]


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
        self._stop_ids = self._template.stop_ids(declared)
        self._token_text: dict[int, str] = {}
        check_budget(profile, model, "budget")
        self.reset()

    def reset(self) -> None:
        """Forget the whole conversation; the settings stay."""
        self._engine = Engine(
            self.model,
            build_memory(self.profile),
            seed=self.profile.seed,
            ends_sentence=SentenceEnds(self.model.tokenizer),
        )
        self._turn = 0
        self._round = 0
        self._owed: list[int] = []  # ids that must follow before the next turn
        self._totals = _Tally(0, "")

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
        yield from self._reply(interrupted)

    def read_user(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a user turn, and the system prompt before the first one."""
        yield from self._settle()
        if self._turn == 0:
            system, ids = self._template.opening(text, self.profile.system)
            self._check_room(ids, system)
            if system is not None:
                yield from self._read_system(system)
        else:
            ids = self._template.user(text)
            self._check_room(ids)
        self._round += 1
        tally = self._tally("user")
        place = Place(tally.index, self._round)
        closing = self._template.closing
        wanted = self.profile.max_new_tokens + len(closing)
        for record in self._engine.open_turn(len(ids.ids), wanted, place):
            yield self._forgot(record, tally)
        yield from self._feed(ids, place, tally, interrupted, after=closing)
        yield self._done(tally, text)

    def read_reply(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a reply from a transcript instead of generating one."""
        tally = self._tally("assistant")
        ids = self._template.assistant(text)
        place = Place(tally.index, self._round)
        self._engine.require(len(ids.ids) + len(self._template.closing))
        yield from self._feed(ids, place, tally, interrupted, after=self._template.closing)
        yield from self._close(place, tally)
        yield self._done(tally, text)

    def switch(self, source: str, **updates: Any) -> Iterator[Event]:
        """Change settings at once; what no longer fits is chosen by the new ones.

        Raises SettingError, changing nothing; `source` is what it blames, such as "/budget".
        """
        profile = changed(self.profile, source, **updates)
        check_budget(profile, self.model, source)
        memory = build_memory(profile)
        before = self.profile
        for record in self._engine.switch(memory):
            yield self._forgot(record, _Tally(max(0, self._turn - 1), ""))
        self.profile = profile
        for name in type(profile).model_fields:
            old, new = getattr(before, name), getattr(profile, name)
            if old != new:
                yield Switched(name, old, new, restored=0, resident=self.resident)
                if not has_effect(profile, name):
                    yield Notice(f"policy {profile.policy} makes no use of {name}")

    def end(self) -> Ended:
        """The closing record."""
        return Ended(
            turns=self._turn,
            seen=self.seen,
            resident=self.resident,
            tokens_out=self._totals.tokens_out,
            seconds_prefill=self._totals.seconds_prefill,
            seconds_decode=self._totals.seconds_decode,
        )

    def snapshot(self) -> Snapshot:
        """The memory as it is now."""
        return Snapshot(
            model=self.model.name,
            policy=self.profile.policy,
            decay=self.profile.decay,
            budget=self.budget,
            resident=self.resident,
            seen=self.seen,
            rows=self._rows(self._engine.ledger.held_positions),
        )

    def _reply(self, interrupted: Interrupted) -> Iterator[Event]:
        tally = self._tally("assistant")
        place = Place(tally.index, self._round)
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
        if failure is not None:
            yield Notice(str(failure))

    def _generate(
        self, place: Place, tally: _Tally, interrupted: Interrupted
    ) -> Iterator[Generated | Evicted | Stopped]:
        """The engine's records, timed; the clock stops while the listener has the record."""
        records = self._engine.generate(
            Sampler(build_sampling(self.profile)),
            place,
            stop_ids=self._stop_ids,
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

    def _close(self, place: Place, tally: _Tally) -> Iterator[Event]:
        """Read the ids that end a reply, and let the round's decay take effect."""
        closing = self._template.closing
        ids = TurnIds(closing, [Role.TEMPLATE] * len(closing), (0, 0))
        yield from (e for e in self._feed(ids, place, tally) if not isinstance(e, Reading))
        self._engine.close_round()

    def _settle(self) -> Iterator[Event]:
        """Close a turn that a failure left open, so that the conversation is well-formed again."""
        if self._owed:
            tally = _Tally(max(0, self._turn - 1), "")
            place = Place(tally.index, self._round)
            owed = TurnIds(self._owed, [Role.TEMPLATE] * len(self._owed), (0, 0))
            yield from self._feed(owed, place, tally)
            if self._round:
                self._engine.close_round()

    def _read_system(self, ids: TurnIds) -> Iterator[Event]:
        tally = self._tally("system")
        place = Place(tally.index, self._round)
        yield from self._feed(ids, place, tally, pinned=self.profile.pin_system)
        yield self._done(tally, self.profile.system or "")

    def _feed(
        self,
        turn: TurnIds,
        place: Place,
        tally: _Tally,
        interrupted: Interrupted = lambda: False,
        *,
        pinned: bool = False,
        after: Sequence[int] = (),
    ) -> Iterator[Event]:
        """Read a turn; an interrupt skips the rest of its text, never the template's ids.

        `after` are the ids that its round still needs, should reading fail.
        """
        done, end = 0, len(turn.ids)
        self._owed = [*turn.ids[turn.content[1] :], *after]
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
                    self._owed = [*turn.ids[max(done, turn.content[1]) :], *after]
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

    def _tally(self, role: str) -> _Tally:
        tally = _Tally(self._turn, role)
        self._turn += 1
        return tally

    def _forgot(self, record: Evicted, tally: _Tally) -> Event:
        tally.evicted += len(record.positions)
        return Forgot(
            turn=tally.index,
            positions=tuple(record.positions.tolist()),
            resident=record.resident,
            seen=record.seen,
            tokens=self._rows(record.positions) if self._rows_in_events else None,
        )

    def _done(self, tally: _Tally, text: str) -> TurnDone:
        totals = self._totals
        totals.tokens_out += tally.tokens_out
        totals.seconds_prefill += tally.seconds_prefill
        totals.seconds_decode += tally.seconds_decode
        return TurnDone(
            text=text,
            resident=self.resident,
            seen=self.seen,
            recalled=0,
            tokens=self.snapshot().rows if self._rows_in_events else None,
            **{field.name: getattr(tally, field.name) for field in fields(tally)},
        )

    def _rows(self, positions: Any) -> tuple[TokenRow, ...]:
        """Ledger rows at these positions, as records."""
        ledger, sinks = self._engine.ledger, self.profile.sinks
        names = ("token_id", "turn", "role", "surprisal", "arrival_key", "flags")
        columns = [ledger.column(name)[positions].tolist() for name in names]
        with_scores = zip(
            positions.tolist(), *columns, _exp(ledger.log_score_of(positions)), strict=True
        )
        return tuple(
            TokenRow(
                position=position,
                id=token_id,
                text=self._text_of(token_id),
                turn=turn,
                role=Role(role).name.lower(),
                surprisal=None if surprisal != surprisal else surprisal,
                score=score,
                arrival_key=key,
                flags=_flag_names(flags, position < sinks),
            )
            for position, token_id, turn, role, surprisal, key, flags, score in with_scores
        )

    def _text_of(self, token_id: int) -> str:
        if token_id not in self._token_text:
            self._token_text[token_id] = str(self.model.tokenizer.decode([token_id]))
        return self._token_text[token_id]


def _exp(values: Any) -> list[float]:
    out: list[float] = np.exp(values).tolist()
    return out


def _flag_names(flags: int, sink: bool) -> tuple[str, ...]:
    names = ["sink"] if sink else []
    names += [flag.name.lower() for flag in Flag if flags & flag and flag.name]
    return tuple(names)
