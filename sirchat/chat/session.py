"""A conversation with one model: it reads and answers turns, and yields events.

`ask`, `retry`, `read_user` and `read_reply` are generators: they do their work while the caller
iterates over the events. Other methods work at once. The ids that the chat template puts at the end
of a turn are always read: at once if a reply was interrupted or had no more room, and before the
next turn if an error cut a turn off.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Ended, Erased, Event, Notice, Pinned, RecalledTurn, TokenRow, Undone
from sirchat.chat.panel_snapshot import Snapshot, take_snapshot
from sirchat.chat.settings import (
    all_or_nothing,
    build_cache_settings,
    build_engine,
    build_sampling,
    check_profile,
    switched,
    undone,
)
from sirchat.chat.state import (
    ConversationState,
    Reply,
    Turn,
    TurnStats,
    UndoPoint,
    reply_at_end,
    undo_depth,
)
from sirchat.chat.targets import Target, erase_text, positions_of, tokens_to_erase
from sirchat.chat.turn import Interrupted, OpenTurn
from sirchat.chat.why import AttentionPaid, TokenRank, attention_paid, token_ranks
from sirchat.config.profile import Profile
from sirchat.engine.budget import Division, budget_for
from sirchat.engine.extra_passes import score_continuations
from sirchat.engine.sampling import Allowed, FixedIds, PromptLookup, Sampler
from sirchat.engine.types import ContinuationScore, EngineState, RestoredRows
from sirchat.errors import UndoError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import Ledger
from sirchat.models.devices import DeviceMemory, memory_by_device
from sirchat.models.model import LoadedModel
from sirchat.paths import archives_dir
from sirchat.recall.recall import Recall
from sirchat.text.detokenizer import TextStream, TokenTexts
from sirchat.text.template import Template, TurnIds
from sirchat.text.text_file import without_surrogates

__all__ = ("Interrupted", "Session")


class Session:
    """One conversation with one model.

    Args:
        model: a loaded model.
        profile: every setting at the start; `session.profile` has the current settings.
        rows_in_events: whether events list the tokens themselves, not only their positions.

    Raises SettingError for a setting that this model does not allow.
    """

    def __init__(
        self, model: LoadedModel, profile: Profile, *, rows_in_events: bool = False
    ) -> None:
        self.model = model
        self.profile = profile
        self._rows_in_events = rows_in_events
        self.template = Template(model.tokenizer, model.anchors)
        """Converts text to token ids; may be replaced between two turns."""
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        self.stop_ids = self.template.stop_ids(declared)
        self._end_ids = self.template.end_ids(declared)
        self._texts = TokenTexts(model.tokenizer)
        self.allowed: Allowed | None = None
        """Says which tokens may come next in a reply; None if all tokens may."""
        self.together = False
        """Whether to yield `Choosing` before each token, so that sessions can share a batch."""
        self.epoch = 0
        """Number of conversations begun in this session; each `reset` begins a new one."""
        self.erasures = 0
        """Number of times that `erase` was called; after each, saved text must be rewritten."""
        check_profile(profile, model)
        self.reset()

    def reset(self) -> None:
        """Start an empty conversation; the settings stay."""
        self._folder = archives_dir() / f"{os.getpid()}-{secrets.token_hex(4)}"
        settings = build_cache_settings(self.profile, self._folder)
        self._engine = build_engine(self.model, settings, self.profile.seed)
        self.epoch += 1
        self._now = ConversationState()
        self._undo_points: list[UndoPoint] = []  # oldest first
        self._events = EventBuilder(self._engine, self._texts, self._rows_in_events)
        self._recall = Recall(self._engine, self.model)
        self._at_reply = 0, self._engine.ledger.held_positions  # seen and held at a reply's end

    @property
    def conversation(self) -> ConversationState:
        """Turns, token counts and times of this session; callers must not change them."""
        return self._now

    @property
    def turns(self) -> list[Turn]:
        """All messages of the conversation, in order; callers must not change the list."""
        return self._now.turns

    def save(self) -> EngineState:
        """The engine's state, without keys and values, to be saved in a file."""
        return self._engine.save()

    def rows(self, limit: int | None = None) -> KeyValues | None:
        """Keys and values of held and archived tokens; `KeyValueStore.rows` explains `limit`."""
        return self._engine.store.rows(limit)

    def attention(self, positions: Positions) -> AttentionCheckpoint:
        """The attention that the tokens at `positions` have received so far, to be saved."""
        return self._engine.ledger.attention.checkpoint(positions)

    def load(
        self,
        saved: EngineState,
        conversation: ConversationState,
        rows: KeyValues | None,
        attention: AttentionCheckpoint | None = None,
        undo_points: Sequence[UndoPoint] = (),
    ) -> None:
        """Continue a saved session; if `rows` is None, keys and values are computed again.

        Of the loaded turns, only those that have a point in `undo_points` can be undone.
        """
        self.reset()
        self._engine.load(saved, rows, attention)
        self._now, self._undo_points = conversation, list(undo_points)

    @property
    def resident(self) -> int:
        """Number of tokens in the KV cache now."""
        return self._engine.resident

    @property
    def seen(self) -> int:
        """Number of tokens read or generated since the conversation began."""
        return self._engine.ledger.seen

    @property
    def recalled(self) -> dict[int, float]:
        """By position, the scores of the tokens that recall restored; all 0 after an undo."""
        return self._recall.scores

    @property
    def recalled_turns(self) -> tuple[RecalledTurn, ...]:
        """A record of each turn of which recall restored tokens that are still held, in order."""
        return tuple(RecalledTurn(*turn) for turn in self._recall.turns)

    @property
    def budget(self) -> int:
        """The largest number of tokens that the KV cache may hold."""
        return self._engine.budget

    @property
    def division(self) -> Division:
        """How the budget is divided now among sinks, pins, the policy and recall."""
        return self._engine.residency.divide()

    @property
    def ledger(self) -> Ledger:
        """The table of all tokens ever read, which callers must not change."""
        return self._engine.ledger

    def budget_for(self, tokens: int) -> int | None:
        """The smallest budget that holds a message of so many tokens; None if there is none."""
        engine = self._engine
        return budget_for(tokens, engine.settings, engine.ledger, self.model.context_length)

    def check_pins(self, more: int) -> None:
        """Raise SettingError if `more` pinned tokens, beside the held ones, are too many."""
        self._engine.residency.check_pins(more, self._engine.ledger.held_positions)

    @property
    def memory(self) -> list[DeviceMemory]:
        """For each device, the bytes that the model, the cache and the archive take there."""
        return memory_by_device(self.model.module, self._engine.cache, self._engine.store.archive)

    @property
    def speed(self) -> float:
        """Tokens per second of the current or the last reply; 0 before the first reply."""
        return self._now.reply.tokens_out / max(self._now.reply.seconds_decode, 1e-9)

    def start(self) -> list[Event]:
        """The event `Started`, then a notice for each setting that does not suit this model."""
        return self._events.started(self.model, self.profile)

    def ask(
        self,
        text: str,
        interrupted: Interrupted = lambda: False,
        *,
        attempt: int = 0,
        reply: Reply | None = None,
    ) -> Iterator[Event]:
        """Read a user turn and answer it.

        `attempt` varies the random numbers of sampling; the tokens of `reply`, if given, are taken
        instead of sampled ones. Raises ContextFullError, before reading, if the turn can't fit.
        """
        yield from self.read_user(text, interrupted)
        self._now.attempt = attempt
        yield from self._answer(interrupted, reply)

    def retry(
        self, interrupted: Interrupted = lambda: False, text: str | None = None
    ) -> Iterator[Event]:
        """Undo the last user turn; ask it again with other random numbers, or ask `text` instead.

        Pinned tokens stay pinned. Raises UndoError, changing nothing, if the turn can't be undone.
        """
        text, attempt = (self.last_said, self._now.attempt + 1) if text is None else (text, 0)
        yield from self.undo(keep_pins=True)
        yield from self.ask(text, interrupted, attempt=attempt)

    @contextmanager
    def trial(self, source: str, updates: dict[str, Any]) -> Iterator[None]:
        """Context manager: in it, the settings `updates` hold; at its end, all is undone."""
        profile, points = self.profile, self._undo_points
        with undone(self._engine) as checkpoint:
            start = UndoPoint.of(self._now, checkpoint, "", profile.pin_system, self.budget)
            try:
                self.switch(source, **updates)
                yield
            finally:
                self.profile, self._undo_points = profile, points
                self._now = start.conversation(self._now)
        self._recall.undo()

    @property
    def last_reply(self) -> Reply | None:
        """The last turn, if it is a reply (complete or not); None if it is no reply."""
        return reply_at_end(self._engine.ledger, self.turns)

    def attention_paid(self, turn: int) -> AttentionPaid:
        """The attention that the reply with turn index `turn` paid to the held tokens before it."""
        return attention_paid(self._engine, turn, self._at_reply, self.profile.sinks)

    def read_user(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read a user turn without answering it; before the first one, read the system prompt."""
        text = without_surrogates(text)
        yield from self._flush()
        if self.seen == 0:
            system, ids = self.template.opening(text, self.profile.system)
        else:
            system, ids = None, self.template.user(text)
        self._check_room(ids, system)
        checkpoint = self._engine.checkpoint()
        point = UndoPoint.of(self._now, checkpoint, text, self.profile.pin_system, self.budget)
        depth = undo_depth(self.profile.archive != "off", self._engine.cache.state_nbytes)
        self._undo_points = [*self._undo_points, point][-depth:]
        if system is not None:
            yield from self._read_system(system)
        self._now.round += 1
        self._now.attempt = 0
        self._now.in_round = True
        turn = self._begin("user")
        closing = self.template.closing
        yield from turn.make_room(len(ids.ids), self.profile.max_new_tokens + len(closing))
        texts = [turn.text for turn in self.turns]
        recollection = self._recall.renew(ids.ids, ids.roles, turn.ref, text, texts)
        if recollection is not None:
            turn.stats.seconds_prefill += recollection.seconds
            yield from self._events.recalled(turn.stats.index, recollection, self.recalled_turns)
        yield from turn.read(ids, interrupted, after=closing)
        yield turn.done(text)
        yield from self._events.problems()

    def read_reply(self, text: str, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Read `text`, from a transcript, as the reply, instead of generating a reply."""
        text = without_surrogates(text)
        ids, closing = self.template.assistant(text), self.template.closing
        self._engine.require(len(ids.ids) + len(closing))
        turn = self._begin("assistant")
        yield from turn.read(ids, interrupted, after=closing)
        yield from turn.close(closing)
        yield turn.done(text)
        yield from self._events.problems()

    def score_continuations(self, replies: Sequence[str]) -> tuple[ContinuationScore, ...]:
        """For each reply, log-probabilities of its tokens, or of the end tokens if it is empty."""
        written = [self.template.assistant(one).ids or self.template.closing for one in replies]
        return score_continuations(self._engine.reader, written)

    @property
    def undoable(self) -> tuple[UndoPoint, ...]:
        """An undo point for each user turn that can be undone, in the order of the turns."""
        return tuple(self._undo_points)

    @property
    def last_said(self) -> str:
        """Text of the user turn that `undo` takes back; raises UndoError if there is none."""
        if not self._undo_points:
            off = self.seen and self.profile.archive == "off"
            hint = "more messages can be undone with /set archive ram" if off else ""
            raise UndoError("there is no message to undo", hint=hint)
        return self._undo_points[-1].text

    def undo(self, *, keep_pins: bool = False) -> list[Event]:
        """Undo the last user turn, and all that was read, generated or pinned after it began.

        The settings stay, but the system prompt becomes what it was before the turn. If `keep_pins`
        is true, all pins stay. Raises UndoError, changing nothing, if there is no user turn, or if
        a token that was evicted since the turn began is no longer archived.
        """
        text, point = self.last_said, self._undo_points[-1]
        try:
            self._engine.undo(point.checkpoint, keep_pins=keep_pins)
        except LookupError:
            why = "tokens that it evicted are no longer archived"
            raise UndoError(f"this message can't be undone: {why}") from None
        self._undo_points.pop()
        self._recall.undo()
        self._now = point.conversation(self._now)
        now = (self.profile.system, self.profile.pin_system)
        if (self._now.prompt, point.pin_system) != now and self.seen:
            self.profile = self.profile.model_copy(update={"system": self._now.prompt})
            self._engine.ledger.pin(self._now.system, self.profile.pin_system)
            self._engine.residency.exclude(np.asarray(self._now.system), excluded=False)
        return [Undone(len(self.turns), text, self.resident, self.seen)]

    def pin(self, target: Target, pinned: bool = True, around: int = 0) -> list[Event]:
        """Pin or unpin `target` (text, `last` or `turn N`) and `around` tokens on each side of it.

        Archived tokens are restored when they are pinned. Raises UsageError if nothing matches, and
        SettingError, changing nothing, if the pins would leave too little room.
        """
        positions = self._positions_of(target, self._engine.store.reachable(), around)
        events = self._events.moved(self._now.last, self._engine.residency.pin(positions, pinned))
        events.append(Pinned(len(positions), pinned, self.resident))
        if not self._engine.settings.policy.honours_pins:
            events.append(Notice(f"policy {self.profile.policy} ignores pins"))
        return events

    def erase(self, target: str) -> list[Event]:
        """Erase the tokens that `target` names from the cache, the archive and the turns' text.

        After this, no earlier turn can be undone. Later tokens stay, although they attended to the
        erased tokens. Raises UsageError if nothing matches.
        """
        system = self.profile.system
        positions = tokens_to_erase(target, self._engine, self._texts, self._now, system)
        self._engine.erase(positions)
        self._now.prompt = erase_text(target, self._now, system)
        self.profile = self.profile.model_copy(update={"system": self._now.prompt})
        self._undo_points = []
        self._recall.erase_words()
        self.erasures += 1
        return [Erased(len(positions), self.resident)]

    def why(self, target: str) -> list[TokenRank]:
        """Score, rank and state of each token that `target` names; UsageError if none matches."""
        at, now = self._positions_of(target, np.arange(self.seen)), self.snapshot(strongest=0)
        return token_ranks(self._engine, self._texts, at, now, sinks=self.profile.sinks)

    def _positions_of(self, target: Target, among: Positions, around: int = 0) -> Positions:
        ledger, roles = self._engine.ledger, self._now.roles
        return positions_of(target, ledger, self._texts, roles, among, around)

    def switch(
        self, source: str, interrupted: Interrupted = lambda: False, /, **updates: Any
    ) -> list[Event]:
        """Change the settings `updates`, and evict or restore tokens as the new settings require.

        If the system prompt of a begun chat changes, the old one is evicted, and the new one is
        read and, if `pin_system` is set, pinned; an interrupt ends the reading. Raises SettingError
        for a value that is not allowed, changing nothing; its message begins with `source`.
        """
        before, profile = self.profile, switched(self.profile, self.model, source, updates)
        settings = build_cache_settings(profile, self._folder)
        replaced = self.seen > 0 and profile.system != before.system
        prompt = self.template.system(profile.system) if replaced and profile.system else None
        size = len(prompt.ids) if prompt is not None else 0
        with all_or_nothing(self._engine):
            if replaced or profile.pin_system != before.pin_system:
                self._engine.ledger.pin(self._now.system, profile.pin_system and not replaced)
            moves = self._engine.residency.switch(settings, size if profile.pin_system else 0)
            if replaced:
                moves += self._engine.residency.exclude(np.asarray(self._now.system))
            self._engine.require(size)
        self.profile = profile
        if replaced:
            self._now.system, self._now.prompt = range(0), None
        events = self._events.moved(self._now.last, moves)
        restored = sum(len(one.positions) for one in moves if isinstance(one, RestoredRows))
        events += self._events.switched(self.model, before, profile, restored)
        if prompt is not None:
            events += [*self._flush(), *self._read_system(prompt, interrupted)]
        return events

    def end(self) -> Ended:
        """The event that ends the session."""
        return self._events.ended(self._now)

    def snapshot(self, strongest: int | None = None) -> Snapshot:
        """A snapshot of the cache; if `strongest` is given, a short one with so many tokens."""
        return take_snapshot(
            self._engine,
            self.profile,
            self._texts,
            self._now.roles,
            model=self.model.name,
            speed=self.speed,
            in_round=self._now.in_round,
            strongest=strongest,
            recalled_turns=self.recalled_turns,
        )

    def tokens(self, positions: Sequence[int]) -> tuple[TokenRow, ...]:
        """A record of each token, held or evicted, at these stream positions (ascending)."""
        return self._events.tokens(np.asarray(positions, np.int64))

    def _answer(self, interrupted: Interrupted, reply: Reply | None = None) -> Iterator[Event]:
        turn, closing = self._begin("assistant"), self.template.closing
        given = None if reply is None else FixedIds(reply.ids)
        records = self._engine.generate(
            given or Sampler(build_sampling(self.profile), self._now.attempt, self.allowed),
            turn.ref,
            stop_ids=self.stop_ids,
            max_new_tokens=self.profile.max_new_tokens,
            closing=len(closing),
            interrupted=interrupted if given is None else given.are_picked,
            lookup=PromptLookup() if self.profile.lookup else None,
            together=lambda: self.together,
        )
        if reply is not None:
            records = turn.ending_as(records, reply.finish)
        yield from turn.answer(records, TextStream(self.model.tokenizer), closing, self._end_ids)
        self._at_reply = self.seen, self._engine.ledger.held_positions.copy()

    def _flush(self) -> list[Event]:
        """Read the pending template ids of a turn that was cut off; returns the events."""
        if self.seen == 0:  # nothing was read: the turn is treated as never begun
            self._now.pending_ids, self._now.turns = [], []
        return self._turn(TurnStats(self._now.last, "")).flush()

    def _read_system(self, ids: TurnIds, interrupted: Interrupted = bool) -> Iterator[Event]:
        turn, start = self._begin("system"), self.seen
        try:
            yield from turn.read(ids, interrupted, pinned=self.profile.pin_system)
        finally:  # also after an error: the part that was read is pinned, and can be unpinned
            self._now.system = range(start, self.seen)
            self._now.prompt = self.profile.system
        yield turn.done(self.profile.system or "")

    def _check_room(self, ids: TurnIds, system: TurnIds | None = None) -> None:
        """Raise SettingError or ContextFullError if the turn `ids`, after `system`, can't fit."""
        before = len(system.ids) if system is not None else 0
        if system is not None and self.profile.pin_system:
            self._engine.residency.check_pins(before)
        self._engine.require(before + len(ids.ids) + len(self.template.closing))

    def _begin(self, role: str) -> OpenTurn:
        return self._turn(self._now.begin(role))

    def _turn(self, stats: TurnStats) -> OpenTurn:
        return OpenTurn(self._now, self._engine, self._events, stats, self.profile.evict_thinking)
