"""A conversation: turns in, events out, settings that switch in the middle.

Nobody but the session and its parts touches the engine: a turn under way is an `open_turn`, and
`recollection`, `forgetting` and `switching` do what their names say. After every event the
conversation is well-formed: a reply that was interrupted, or ran out of room, is closed like any
other.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sirchat import __version__
from sirchat.chat.conversation import UNDO_DEPTH, Conversation, Tally, Turn, UndoPoint
from sirchat.chat.events import Ended, Event, Forgotten, Notice, Pinned, Started, TokenRow, Undone
from sirchat.chat.forget import erase_text, tokens_to_erase
from sirchat.chat.recall import TurnRecall
from sirchat.chat.reports import Reports
from sirchat.chat.settings import (
    build_cache_settings,
    build_sampling,
    check_attention,
    check_budget,
    check_recall,
)
from sirchat.chat.snapshot import Positions, Snapshot, take_snapshot
from sirchat.chat.standing import Standing, standings
from sirchat.chat.switching import all_or_nothing, switched
from sirchat.chat.targets import positions_of
from sirchat.chat.turn import Interrupted, OpenTurn
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.records import ContinuationScore, EngineState, RestoredRows
from sirchat.engine.sampling import Sampler
from sirchat.errors import UndoError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.segments import Rows
from sirchat.models.model import LoadedModel
from sirchat.paths import archives_dir
from sirchat.text.anchors import ends_sequence
from sirchat.text.detokenizer import TextStream, TokenTexts
from sirchat.text.template import Template, TurnIds

__all__ = ["Interrupted", "Session"]


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
        self.template = Template(model.tokenizer, model.anchors)
        """Writes turns as ids; another may be put in its place between two turns."""
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        self.stop_ids = self.template.stop_ids(declared)
        self._texts = TokenTexts(model.tokenizer)
        self.epoch = self.erasures = 0
        check_budget(profile, model, "budget")
        check_recall(profile, model, "recall")
        check_attention(profile, model, "policy")
        self.reset()

    def reset(self) -> None:
        """Forget the whole conversation; the settings stay."""
        self._folder = archives_dir() / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._engine = Engine(
            self.model,
            build_cache_settings(self.profile, self._folder),
            seed=self.profile.seed,
            ends_sequence=ends_sequence(self.model.tokenizer, self.model.anchors),
        )
        self.epoch += 1
        self._now = Conversation()
        self._moments: list[UndoPoint] = []  # the beginnings of the turns that can be undone
        self._recollection = TurnRecall(self._engine, self.model)

    @property
    def conversation(self) -> Conversation:
        """Where the conversation stands; for reading only."""
        return self._now

    @property
    def turns(self) -> list[Turn]:
        """What was said, turn by turn; for reading only."""
        return self._now.turns

    def save(self) -> EngineState:
        """The engine's state, but keys and values; see `saving`."""
        return self._engine.save()

    def rows(self, limit: int | None = None) -> Rows | None:
        """Keys and values of all that is held or archived, on the CPU.

        Of what is held alone, if all take more than `limit` bytes; None if that does, too.
        """
        return self._engine.store.rows(limit)

    def received(self, positions: Positions) -> AttentionCheckpoint:
        """What attention these tokens got, where it was counted; see `saving`."""
        return self._engine.ledger.attention.received(positions)

    def load(
        self,
        saved: EngineState,
        conversation: Conversation,
        rows: Rows | None,
        received: AttentionCheckpoint | None = None,
    ) -> None:
        """Go on where a saved session was; without `rows` the held tokens are read anew.

        Turns of before can't be undone.
        """
        self.reset()
        self._engine.load(saved, rows, self.model.device, received)
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
    def recalled(self) -> dict[int, float]:
        """What came back for this round: how well each fits, by position, ascending.

        After an undo or a resume the tokens are known, and not how well they fit: 0.
        """
        return self._recollection.fits

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
        yield from self._reports.clamped(self.profile.recall_n)
        yield from self._reports.untrained(self.model.anchors)
        yield from self._reports.uncounted(self.model)

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
            system, ids = self.template.opening(text, self.profile.system)
        else:
            system, ids = None, self.template.user(text)
        self._check_room(ids, system)
        moment = UndoPoint.of(self._now, self._engine.checkpoint(), text)
        self._moments = [*self._moments, moment][-self._undo_depth :]
        if system is not None:
            yield from self._read_system(system)
        self._now.round += 1
        self._now.attempt = 0
        self._now.in_round = True
        turn = self._begin("user")
        closing = self.template.closing
        yield from turn.make_room(len(ids.ids), self.profile.max_new_tokens + len(closing))
        yield from self._recollection.renew(turn, ids, self._reports)
        yield from turn.read(ids, interrupted, after=closing)
        yield turn.done(text)
        yield from self._reports.troubles()

    def read_reply(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a reply from a transcript instead of generating one."""
        ids, closing = self.template.assistant(text), self.template.closing
        self._engine.require(len(ids.ids) + len(closing))
        turn = self._begin("assistant")
        yield from turn.read(ids, interrupted, after=closing)
        yield from turn.close(closing)
        yield turn.done(text)
        yield from self._reports.troubles()

    def score_continuation(self, reply: str) -> ContinuationScore:
        """How likely a reply would be now, or the beginning of one; nothing is said by it."""
        return self._engine.score_continuation(self.template.assistant(reply).ids)

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
        yield Undone(len(self.turns), moment.text, self.resident, self.seen)

    def pin(self, target: str, pinned: bool = True) -> Iterator[Event]:
        """Never forget what `target` means, or let it go; `targets.positions_of` says how.

        What is archived comes back. Raises UsageError where nothing is meant, and SettingError,
        changing nothing, when the pins would leave too little room.
        """
        positions = self._meant(target, self._engine.store.reachable())
        moves = list(self._engine.pin(positions, pinned))
        yield from self._reports.moved(self._now.last, moves)
        yield Pinned(len(positions), pinned, self.resident)
        if not self._engine.settings.policy.honours_pins:
            yield Notice(f"policy {self.profile.policy} makes no use of pins")

    def forget(self, target: str) -> Iterator[Event]:
        """Erase what `target` means: from cache, archive, ledger, text, and what could be undone.

        What was read after it has seen it, and stays. Raises UsageError where nothing is meant.
        """
        system = self.profile.system
        positions = tokens_to_erase(target, self._engine, self._texts, self._now, system)
        self._engine.forget(positions)
        self._now.prompt = erase_text(target, self._now, system)
        self.profile = self.profile.model_copy(update={"system": self._now.prompt})
        self._moments = []
        self.erasures += 1
        yield Forgotten(len(positions), self.resident)

    def why(self, target: str) -> list[Standing]:
        """Where the tokens stand that `target` means, held or not; raises UsageError for none."""
        return standings(
            self._engine,
            self._texts,
            self._meant(target, np.arange(self.seen)),
            self.snapshot(strongest=0),
            sinks=self.profile.sinks,
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
        before, profile = self.profile, switched(self.profile, self.model, source, updates)
        memory = build_cache_settings(profile, self._folder)
        replaced = self.seen > 0 and profile.system != before.system
        prompt = self.template.system(profile.system) if replaced and profile.system else None
        size = len(prompt.ids) if prompt is not None else 0
        with all_or_nothing(self._engine):
            if replaced or profile.pin_system != before.pin_system:
                self._engine.ledger.pin(self._now.system, profile.pin_system and not replaced)
            moves = list(self._engine.switch(memory, size if profile.pin_system else 0))
            self._engine.require(size)
        reports, self.profile = self._reports, profile
        if replaced:
            self._now.system, self._now.prompt = range(0), None
        yield from reports.moved(self._now.last, moves)
        restored = sum(len(one.positions) for one in moves if isinstance(one, RestoredRows))
        yield from reports.switched(before, profile, restored)
        if profile.policy != before.policy:
            yield from reports.untrained(self.model.anchors)
            yield from reports.uncounted(self.model)
        if prompt is not None:
            yield from self._settle()
            yield from self._read_system(prompt, interrupted)

    def end(self) -> Ended:
        """The closing record."""
        return Ended(
            turns=len(self.turns),
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
        return self._reports.tokens(np.asarray(positions, np.int64))

    def _answer(self, interrupted: Interrupted) -> Iterator[Event]:
        turn, closing = self._begin("assistant"), self.template.closing
        records = self._engine.generate(
            Sampler(build_sampling(self.profile), self._now.attempt),
            turn.place,
            stop_ids=self.stop_ids,
            max_new_tokens=self.profile.max_new_tokens,
            reserve=len(closing),
            interrupted=interrupted,
        )
        yield from turn.answer(records, TextStream(self.model.tokenizer), closing)

    def _settle(self) -> Iterator[Event]:
        """Close a turn that a failure left open, so that the conversation is well-formed again."""
        if self.seen == 0:  # nothing of it was read: it has never been
            self._now.owed, self._now.turns = [], []
        yield from self._turn(Tally(self._now.last, "")).settle()

    def _read_system(
        self, ids: TurnIds, interrupted: Interrupted = lambda: False
    ) -> Iterator[Event]:
        turn, start = self._begin("system"), self.seen
        try:
            yield from turn.read(ids, interrupted, pinned=self.profile.pin_system)
        finally:  # what was read is pinned, and can be let go, however the reading ended
            self._now.system = range(start, self.seen)
            self._now.prompt = self.profile.system
        yield turn.done(self.profile.system or "")

    def _check_room(self, ids: TurnIds, system: TurnIds | None = None) -> None:
        """Refuse a turn, before anything is read, when it can't fit."""
        before = len(system.ids) if system is not None else 0
        if system is not None and self.profile.pin_system:
            self._engine.check_pins(before)
        self._engine.require(before + len(ids.ids) + len(self.template.closing))

    def _begin(self, role: str) -> OpenTurn:
        """A turn more."""
        return self._turn(self._now.begin(role))

    def _turn(self, tally: Tally) -> OpenTurn:
        """A turn as it goes on: one that has begun, or the last, where only ids are owed."""
        return OpenTurn(self._now, self._engine, self._reports, tally)

    @property
    def _reports(self) -> Reports:
        return Reports(self._engine, self._texts, self.profile.sinks, self._rows_in_events)
